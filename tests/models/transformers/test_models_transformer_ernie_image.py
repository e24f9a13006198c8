import unittest

import diffusers
import pytest
import torch

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


if not hasattr(diffusers, "ErnieImageTransformer2DModel"):
    pytest.skip("this diffusers has no ErnieImageTransformer2DModel", allow_module_level=True)


class ErnieImageTransformerTesterConfig(BaseModelTesterConfig):
    """Padded text."""

    model_class = diffusers.ErnieImageTransformer2DModel
    floating_inputs = ("hidden_states", "text_bth")

    def get_init_dict(self):
        return {
            "hidden_size": 40,
            "num_attention_heads": 5,
            "num_layers": 2,
            "ffn_hidden_size": 72,
            "in_channels": 4,
            "out_channels": 4,
            "patch_size": 2,
            "text_in_dim": 24,
            "rope_axes_dim": (4, 2, 2),
        }

    def get_dummy_inputs(self, batch_size=1):
        return {
            "hidden_states": randn(batch_size, 4, 10, 6, seed=1),  # 15 tokens, and 8 words
            "text_bth": randn(batch_size, 8, 24, seed=2),
            "text_lens": torch.tensor([6, 3])[:batch_size],
            "timestep": torch.tensor([500.0, 250.0])[:batch_size],
        }


class TestErnieImageTransformer(ErnieImageTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
