import unittest

import diffusers
import pytest
import torch

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


if not hasattr(diffusers, "AnyFlowTransformer3DModel"):
    pytest.skip("this diffusers has no AnyFlow", allow_module_level=True)


class AnyFlowTransformerTesterConfig(BaseModelTesterConfig):
    """With the tokens of an image; each frame has timesteps of its own."""

    model_class = diffusers.AnyFlowTransformer3DModel

    def get_init_dict(self):
        return {
            "num_attention_heads": 5,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 16,
            "freq_dim": 32,
            "ffn_dim": 48,
            "num_layers": 2,
            "image_dim": 14,
            "rope_max_seq_len": 32,
        }

    def get_dummy_inputs(self, batch_size=1):
        timestep = torch.tensor([[0.0, 500.0, 600.0], [100.0, 250.0, 300.0]])[:batch_size]
        return {
            "hidden_states": randn(batch_size, 3, 4, 6, 10, seed=1),  # 45 tokens
            "encoder_hidden_states": randn(batch_size, 11, 16, seed=2),
            "encoder_hidden_states_image": randn(batch_size, 7, 14, seed=3),
            "timestep": timestep,
            "r_timestep": timestep / 2,
        }


class TestAnyFlowTransformer(AnyFlowTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
