import unittest

import torch
from diffusers import LuminaNextDiT2DModel

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


class LuminaNextDiTTransformerTesterConfig(BaseModelTesterConfig):
    """Two query heads for each key head, padded text, attention in proportion to the number of tokens."""

    model_class = LuminaNextDiT2DModel
    real_init_dict = {"num_kv_heads": 8}
    without_effect = {"layers.*.attn2.norm_k.bias": "what all keys share moves no softmax"}
    cross_attention_kwargs = {"base_sequence_length": 9}

    def get_init_dict(self):
        return {
            "sample_size": 10,
            "patch_size": 2,
            "in_channels": 4,
            "hidden_size": 80,
            "num_layers": 2,
            "num_attention_heads": 10,
            "num_kv_heads": 5,
            "multiple_of": 8,
            "cross_attention_dim": 24,
        }

    def get_dummy_inputs(self, batch_size=1):
        return {
            "hidden_states": randn(batch_size, 4, 10, 6, seed=1),  # 15 tokens
            "timestep": torch.tensor([0.7, 0.2])[:batch_size],
            "encoder_hidden_states": randn(batch_size, 7, 24, seed=2),
            "encoder_mask": (torch.arange(7)[None] < torch.tensor([[5], [3]])[:batch_size]).long(),
            "image_rotary_emb": torch.polar(torch.ones(6, 6, 4), randn(6, 6, 4, seed=3)),
            "cross_attention_kwargs": self.cross_attention_kwargs,
        }


class LuminaNextDiTPlainTransformerTesterConfig(LuminaNextDiTTransformerTesterConfig):
    """As many key heads, no norms of q and k, plain attention."""

    without_effect = {}
    cross_attention_kwargs = {}

    def get_init_dict(self):
        return {
            **super().get_init_dict(),
            "hidden_size": 40,
            "num_attention_heads": 5,
            "num_kv_heads": None,
            "qk_norm": False,
        }


class TestLuminaNextDiTPlainTransformer(LuminaNextDiTPlainTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestLuminaNextDiTTransformer(LuminaNextDiTTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
