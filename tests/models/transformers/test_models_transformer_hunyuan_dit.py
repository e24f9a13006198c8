import unittest

import torch
from diffusers import HunyuanDiT2DModel

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


class HunyuanDiTTesterConfig(BaseModelTesterConfig):
    """1.1, with style and sizes; skips over the middle of its six blocks, and a ControlNet's residuals."""

    model_class = HunyuanDiT2DModel
    real_init_dict = {"in_channels": 4, "patch_size": 2, "hidden_size": 1408, "num_layers": 40, "mlp_ratio": 4.3637}

    def get_init_dict(self):
        return {
            "num_attention_heads": 5,
            "attention_head_dim": 8,
            "hidden_size": 40,
            "in_channels": 4,
            "patch_size": 2,
            "sample_size": 10,
            "num_layers": 6,
            "cross_attention_dim": 24,
            "cross_attention_dim_t5": 16,
            "pooled_projection_dim": 12,
            "text_len": 5,
            "text_len_t5": 6,
        }

    def get_dummy_inputs(self, batch_size=1):
        mask, mask_t5 = torch.ones(batch_size, 5), torch.ones(batch_size, 6)
        mask[0, 3:], mask_t5[0, 4:] = 0, 0
        angles = randn(15, 4, seed=4).repeat_interleave(2, dim=1)
        return {
            "hidden_states": randn(batch_size, 4, 10, 6, seed=1),  # 15 tokens
            "timestep": torch.tensor([500.0, 250.0])[:batch_size],
            "encoder_hidden_states": randn(batch_size, 5, 24, seed=2),
            "text_embedding_mask": mask,
            "encoder_hidden_states_t5": randn(batch_size, 6, 16, seed=3),
            "text_embedding_mask_t5": mask_t5,
            "image_meta_size": torch.tensor([[80, 48, 80, 48, 0, 0], [96, 64, 80, 48, 4, 8]])[:batch_size],
            "style": torch.zeros(batch_size, dtype=torch.long),
            "image_rotary_emb": (angles.cos(), angles.sin()),
        }

    def get_inputs(self, batch_size=1):
        residuals = [randn(batch_size, 15, 40, seed=5 + index) for index in range(2)]
        return {**super().get_inputs(batch_size), "controlnet_block_samples": residuals}

    def get_output(self, model, inputs):
        # The model takes the residuals out of the list that it is given.
        residuals = inputs.get("controlnet_block_samples")
        return super().get_output(model, {**inputs, "controlnet_block_samples": residuals and list(residuals)})


class TestHunyuanDiT(HunyuanDiTTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
