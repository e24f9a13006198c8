import unittest

import torch
from diffusers import AllegroTransformer3DModel

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


class AllegroTransformerTesterConfig(BaseModelTesterConfig):
    """With padding of the text."""

    model_class = AllegroTransformer3DModel
    without_effect = {"transformer_blocks.*.attn2.to_k.bias": "adds the same to all scores of a query"}

    def get_init_dict(self):
        return {
            "patch_size": 2,
            "patch_size_t": 1,
            "num_attention_heads": 5,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "cross_attention_dim": 60,
            "sample_height": 6,
            "sample_width": 10,
            "sample_frames": 3,
            "caption_channels": 16,
        }

    def get_dummy_inputs(self, batch_size=1):
        mask = torch.ones(batch_size, 11)
        mask[0, 4:] = 0
        freqs = [randn(size, 2, seed=3 + axis).repeat(1, 2) for axis, size in enumerate((3, 3, 5))]
        grid = torch.meshgrid(torch.arange(3), torch.arange(3), torch.arange(5), indexing="ij")
        return {
            "hidden_states": randn(batch_size, 4, 3, 6, 10, seed=1),  # 45 tokens
            "encoder_hidden_states": randn(batch_size, 11, 16, seed=2),
            "encoder_attention_mask": mask,
            "timestep": torch.tensor([500, 250])[:batch_size],
            "image_rotary_emb": (
                tuple((each.cos(), each.sin()) for each in freqs),
                tuple(axis.reshape(1, -1) for axis in grid),
            ),
        }


class AllegroMaskedTransformerTesterConfig(AllegroTransformerTesterConfig):
    """With padding of the video as well."""

    cannot = dict.fromkeys(("Ulysses 2", "ring 2", "TP 2 x Ulysses 2"), "cannot go with attention_mask")

    def get_dummy_inputs(self, batch_size=1):
        mask = torch.ones(batch_size, 3, 6, 10)
        mask[0, :, :, 6:] = 0
        return {**super().get_dummy_inputs(batch_size), "attention_mask": mask}


class TestAllegroTransformer(AllegroTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestAllegroMaskedTransformer(AllegroMaskedTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
