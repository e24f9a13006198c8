import unittest

import torch
from diffusers import HunyuanImageTransformer2DModel

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


class HunyuanImageTransformerTesterConfig(BaseModelTesterConfig):
    """Two texts, with padding that the model moves to the end; distilled guidance and a second timestep."""

    model_class = HunyuanImageTransformer2DModel
    without_effect = {
        "context_embedder.token_refiner.refiner_blocks.*.attn.to_k.bias": "adds the same to all scores of a query",
    }

    def get_init_dict(self):
        return {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 5,
            "attention_head_dim": 8,
            "num_layers": 2,
            "num_single_layers": 2,
            "num_refiner_layers": 2,
            "patch_size": (1, 1),
            "guidance_embeds": True,
            "use_meanflow": True,
            "text_embed_dim": 16,
            "text_embed_2_dim": 12,
            "rope_axes_dim": (4, 4),
        }

    def get_dummy_inputs(self, batch_size=1):
        mask, mask_2 = torch.ones(batch_size, 11, dtype=torch.long), torch.ones(batch_size, 6, dtype=torch.long)
        mask[0, 4:] = 0
        mask_2[-1, 5:] = 0
        return {
            "hidden_states": randn(batch_size, 4, 5, 9, seed=1),  # 45 tokens
            "encoder_hidden_states": randn(batch_size, 11, 16, seed=2),
            "encoder_attention_mask": mask,
            "encoder_hidden_states_2": randn(batch_size, 6, 12, seed=3),
            "encoder_attention_mask_2": mask_2,
            "timestep": torch.tensor([500.0, 250.0])[:batch_size],
            "timestep_r": torch.tensor([400.0, 150.0])[:batch_size],
            "guidance": torch.tensor([4000.0, 2000.0])[:batch_size],
        }


class TestHunyuanImageTransformer(HunyuanImageTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class HunyuanImageRefinerTransformerTesterConfig(HunyuanImageTransformerTesterConfig):
    """The refiner: one text, patches of three dims."""

    def get_init_dict(self):
        return {
            **super().get_init_dict(),
            "patch_size": (1, 1, 1),
            "use_meanflow": False,
            "text_embed_2_dim": None,
            "rope_axes_dim": (2, 2, 4),
        }

    def get_dummy_inputs(self, batch_size=1):
        kept = ("encoder_hidden_states", "encoder_attention_mask", "timestep", "guidance")
        inputs = super().get_dummy_inputs(batch_size)
        return {"hidden_states": randn(batch_size, 4, 3, 3, 5, seed=1), **{name: inputs[name] for name in kept}}


class TestHunyuanImageRefinerTransformer(
    HunyuanImageRefinerTransformerTesterConfig, PlanTesterMixin, unittest.TestCase
):
    pass
