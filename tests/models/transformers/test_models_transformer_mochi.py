import unittest

import torch
from diffusers import MochiTransformer3DModel

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


class MochiTransformerTesterConfig(BaseModelTesterConfig):
    """Padding that attention leaves out, item by item; the last block's text ends in its attention."""

    model_class = MochiTransformer3DModel
    without_effect = {"transformer_blocks.1.attn1.add_q_proj.*": "the text of the last block goes nowhere"}

    def get_init_dict(self):
        return {
            "patch_size": 2,
            "num_attention_heads": 5,
            "attention_head_dim": 16,  # 80 channels: the pooling of the text has eight heads
            "num_layers": 2,
            "pooled_projection_dim": 24,
            "in_channels": 4,
            "text_embed_dim": 16,
            "time_embed_dim": 12,
        }

    def get_dummy_inputs(self, batch_size=1):
        mask = torch.ones(batch_size, 11, dtype=torch.bool)
        mask[0, 4:] = False
        return {
            "hidden_states": randn(batch_size, 4, 3, 6, 10, seed=1),  # 45 tokens
            "encoder_hidden_states": randn(batch_size, 11, 16, seed=2),
            "encoder_attention_mask": mask,
            "timestep": torch.tensor([500.0, 250.0])[:batch_size],
        }


class TestMochiTransformer(MochiTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    breaks_when_split = True  # of its prompt, padding is left out
