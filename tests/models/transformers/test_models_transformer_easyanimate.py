import unittest

import torch
from diffusers import EasyAnimateTransformer3DModel

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


class EasyAnimateTransformerTesterConfig(BaseModelTesterConfig):
    """Inpainting under control, with two texts, norms after the feed-forwards."""

    model_class = EasyAnimateTransformer3DModel
    without_effect = {
        "transformer_blocks.1.attn1.add_q_proj.*": "the text of the last block goes nowhere",
        "transformer_blocks.1.attn1.to_add_out.*": "the text of the last block goes nowhere",
        "transformer_blocks.1.norm?.linear.*": "the text of the last block, the second half, goes nowhere",
        "transformer_blocks.1.txt_ff.*": "the text of the last block goes nowhere",
    }
    real_init_dict = {"in_channels": 16, "out_channels": 16, "patch_size": 2}

    def get_init_dict(self):
        return {
            "num_attention_heads": 5,
            "attention_head_dim": 16,
            "in_channels": 11,
            "out_channels": 4,
            "patch_size": 2,
            "sample_width": 10,
            "sample_height": 6,
            "num_layers": 2,
            "mmdit_layers": 2,
            "time_embed_dim": 12,
            "text_embed_dim": 16,
            "text_embed_dim_t5": 12,
            "after_norm": True,
        }

    def get_dummy_inputs(self, batch_size=1):
        return {
            "hidden_states": randn(batch_size, 4, 3, 6, 10, seed=1),  # 45 tokens
            "inpaint_latents": randn(batch_size, 5, 3, 6, 10, seed=2),
            "control_latents": randn(batch_size, 2, 3, 6, 10, seed=5),
            "encoder_hidden_states": randn(batch_size, 8, 16, seed=3),
            "encoder_hidden_states_t5": randn(batch_size, 3, 12, seed=4),
            "timestep": torch.tensor([500.0, 250.0])[:batch_size],
        }


class TestEasyAnimateTransformer(EasyAnimateTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
