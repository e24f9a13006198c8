import unittest

import torch
from diffusers import SD3Transformer2DModel

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.context_parallelism import ContextParallelTesterMixin
from ..testing_utils.plans import PlanTesterMixin


class SD3TransformerTesterConfig(BaseModelTesterConfig):
    """Of 3.5: attention to the image alone in the first block, norms of q and k."""

    model_class = SD3Transformer2DModel
    repeated_block_count = 0
    without_effect = {
        "transformer_blocks.1.attn.add_q_proj.*": "the text of the last block goes nowhere",
    }

    def get_init_dict(self):
        return {
            "sample_size": 10,
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 5,
            "joint_attention_dim": 32,
            "caption_projection_dim": 40,
            "pooled_projection_dim": 24,
            "dual_attention_layers": (0,),
            "qk_norm": "rms_norm",
        }

    def get_dummy_inputs(self, batch_size=1):
        return {
            "hidden_states": randn(batch_size, 4, 10, 6, seed=1),  # 15 tokens
            "encoder_hidden_states": randn(batch_size, 11, 32, seed=2),
            "pooled_projections": randn(batch_size, 24, seed=3),
            "timestep": torch.tensor([500.0, 250.0])[:batch_size],
        }


class TestSD3Transformer(SD3TransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestSD3TransformerContextParallel(SD3TransformerTesterConfig, ContextParallelTesterMixin, unittest.TestCase):
    """Its processor calls torch's attention itself."""
