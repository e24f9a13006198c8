import unittest

import diffusers
import pytest
import torch

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


if not hasattr(diffusers, "MiniMaxMusic3Transformer1DModel"):
    pytest.skip("this diffusers has no MiniMax Music 3", allow_module_level=True)


class MiniMaxMusic3TesterConfig(BaseModelTesterConfig):
    """Half of each head rotates; the first token is the timestep."""

    model_class = diffusers.MiniMaxMusic3Transformer1DModel
    floating_inputs = ("hidden_states", "encoder_hidden_states", "timestep")

    def get_init_dict(self):
        return {
            "in_channels": 6,
            "condition_dim": 18,
            "num_layers": 2,
            "num_attention_heads": 5,
            "attention_head_dim": 8,
            "ff_inner_dim": 52,
            "rotary_dim": 4,
            "fourier_embedding_dim": 16,
        }

    def get_dummy_inputs(self, batch_size=1):
        return {
            "hidden_states": randn(batch_size, 6, 18, seed=1),  # 19 tokens
            "timestep": torch.tensor([0.5, 0.25])[:batch_size],
            "encoder_hidden_states": randn(batch_size, 18, 18, seed=2),
        }


class TestMiniMaxMusic3(MiniMaxMusic3TesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
