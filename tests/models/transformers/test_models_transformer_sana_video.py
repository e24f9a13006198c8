import unittest

import diffusers
import pytest
import torch

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


if not hasattr(diffusers, "SanaVideoTransformer3DModel"):
    pytest.skip("this diffusers has no SanaVideoTransformer3DModel", allow_module_level=True)


class SanaVideoTransformerTesterConfig(BaseModelTesterConfig):
    """Padded text; heads of another number and size in cross-attention; a convolution over time."""

    model_class = diffusers.SanaVideoTransformer3DModel
    cannot = dict.fromkeys(("Ulysses 2", "ring 2", "TP 2 x Ulysses 2"), "its linear attention sums")

    def get_init_dict(self):
        return {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 5,
            "attention_head_dim": 12,
            "num_layers": 2,
            "num_cross_attention_heads": 10,
            "cross_attention_head_dim": 6,
            "cross_attention_dim": 60,
            "caption_channels": 24,
            "rope_max_seq_len": 16,
        }

    def get_dummy_inputs(self, batch_size=1):
        return {
            "hidden_states": randn(batch_size, 4, 3, 10, 6, seed=1),
            "encoder_hidden_states": randn(batch_size, 7, 24, seed=2),
            "encoder_attention_mask": (torch.arange(7)[None] < torch.tensor([[5], [3]])[:batch_size]).long(),
            "timestep": torch.tensor([500.0, 250.0])[:batch_size],
        }


class TestSanaVideoTransformer(SanaVideoTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
