import unittest

import diffusers
import pytest
import torch

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


if not hasattr(diffusers, "MotifVideoTransformer3DModel"):
    pytest.skip("this diffusers has no Motif-Video", allow_module_level=True)


class MotifVideoTransformerTesterConfig(BaseModelTesterConfig):
    """Text to video, with a mask over the joined sequence."""

    model_class = diffusers.MotifVideoTransformer3DModel

    def get_init_dict(self):
        return {
            "in_channels": 9,
            "out_channels": 4,
            "num_attention_heads": 5,
            "attention_head_dim": 10,
            "num_layers": 2,
            "num_single_layers": 2,
            "patch_size": 2,
            "patch_size_t": 1,
            "text_embed_dim": 16,
            "rope_axes_dim": (2, 4, 4),
        }

    def get_dummy_inputs(self, batch_size=1):
        mask = torch.ones(batch_size, 11, dtype=torch.long)
        mask[0, 4:] = 0
        return {
            "hidden_states": randn(batch_size, 9, 3, 6, 10, seed=1),  # 45 tokens
            "encoder_hidden_states": randn(batch_size, 11, 16, seed=2),
            "encoder_attention_mask": mask,
            "timestep": torch.tensor([500, 250])[:batch_size],
        }


class MotifVideoImageToVideoTransformerTesterConfig(MotifVideoTransformerTesterConfig):
    """Image to video: an image before the text; the video attends to the text once more, by itself."""

    def get_init_dict(self):
        return {
            **super().get_init_dict(),
            "image_embed_dim": 12,
            "enable_text_cross_attention_dual": True,
            "enable_text_cross_attention_single": True,
        }

    def get_dummy_inputs(self, batch_size=1):
        return {**super().get_dummy_inputs(batch_size), "image_embeds": randn(batch_size, 4, 12, seed=3)}


class MotifVideoDecoderTransformerTesterConfig(MotifVideoImageToVideoTransformerTesterConfig):
    """The last blocks decode from the latents, joined with what the others made of them."""

    def get_init_dict(self):
        return {**super().get_init_dict(), "num_single_layers": 4, "num_decoder_layers": 2}


class TestMotifVideoTransformer(MotifVideoTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestMotifVideoImageToVideoTransformer(
    MotifVideoImageToVideoTransformerTesterConfig, PlanTesterMixin, unittest.TestCase
):
    pass


class TestMotifVideoDecoderTransformer(MotifVideoDecoderTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
