import unittest

import torch
from diffusers import LatteTransformer3DModel

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


class LatteTransformerTesterConfig(BaseModelTesterConfig):
    """Three frames of 15 tokens, and padded text."""

    model_class = LatteTransformer3DModel
    without_effect = {"*transformer_blocks.*.attn?.to_k.bias": "softmax takes no notice of what all keys share"}
    real_init_dict = {
        "in_channels": 4,
        "out_channels": 8,
        "attention_head_dim": 72,
        "num_layers": 28,
        "cross_attention_dim": 1152,
        "attention_bias": True,
        "patch_size": 2,
        "activation_fn": "gelu-approximate",
        "num_embeds_ada_norm": 1000,
        "norm_type": "ada_norm_single",
        "norm_elementwise_affine": False,
        "caption_channels": 4096,
    }

    def get_init_dict(self):
        return {
            **self.real_init_dict,
            "num_attention_heads": 5,
            "attention_head_dim": 12,
            "num_layers": 2,
            "cross_attention_dim": 60,
            "sample_size": 10,
            "caption_channels": 18,
            "video_length": 3,
        }

    def get_dummy_inputs(self, batch_size=1):
        mask = torch.ones(batch_size * 3, 11, dtype=torch.bool)  # for each frame
        mask[:3, 4:] = False
        return {
            "hidden_states": randn(batch_size, 4, 3, 10, 6, seed=1),
            "encoder_attention_mask": mask,
            "encoder_hidden_states": randn(batch_size, 11, 18, seed=2),
            "timestep": torch.tensor([500.0, 250.0])[:batch_size],
        }


class TestLatteTransformer(LatteTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
