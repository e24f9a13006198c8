import unittest

import torch
from diffusers import DiTTransformer2DModel

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


class DiTTransformerTesterConfig(BaseModelTesterConfig):
    """Squares of 25 tokens, of classes."""

    model_class = DiTTransformer2DModel
    without_effect = {"transformer_blocks.*.attn1.to_k.bias": "softmax takes no notice of what all keys share"}

    def get_init_dict(self):
        return {
            "num_attention_heads": 5,
            "attention_head_dim": 8,
            "in_channels": 4,
            "out_channels": 8,
            "num_layers": 2,
            "sample_size": 10,
            "num_embeds_ada_norm": 10,
        }

    def get_dummy_inputs(self, batch_size=1):
        return {
            "hidden_states": randn(batch_size, 4, 10, 10, seed=1),
            "timestep": torch.tensor([500.0, 250.0])[:batch_size],
            "class_labels": torch.tensor([3, 7])[:batch_size],
        }


class TestDiTTransformer(DiTTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
