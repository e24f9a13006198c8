import inspect
import unittest

import diffusers
import pytest
import torch

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


if not hasattr(diffusers, "PRXTransformer2DModel"):
    pytest.skip("this diffusers has no PRXTransformer2DModel", allow_module_level=True)


class PRXTransformerTesterConfig(BaseModelTesterConfig):
    """Padded text."""

    model_class = diffusers.PRXTransformer2DModel

    def get_init_dict(self):
        return {
            "in_channels": 4,
            "patch_size": 2,
            "context_in_dim": 24,
            "hidden_size": 40,
            "mlp_ratio": 3.5,
            "num_heads": 5,
            "depth": 2,
            "axes_dim": [4, 4],
        }

    def get_dummy_inputs(self, batch_size=1):
        return {
            "hidden_states": randn(batch_size, 4, 10, 6, seed=1),  # 15 tokens
            "encoder_hidden_states": randn(batch_size, 7, 24, seed=2),
            "timestep": torch.tensor([0.7, 0.2])[:batch_size],
            "attention_mask": torch.arange(7)[None] < torch.tensor([[5], [3]])[:batch_size],
        }


class PRX7BTransformerTesterConfig(PRXTransformerTesterConfig):
    """Of pixels: patches come in through a bottleneck; the resolution is known; no mask."""

    def get_init_dict(self):
        return {**super().get_init_dict(), "bottleneck_size": 12, "resolution_embeds": True}

    def get_dummy_inputs(self, batch_size=1):
        return {**super().get_dummy_inputs(batch_size), "attention_mask": None}


class TestPRXTransformer(PRXTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


@unittest.skipUnless(
    "resolution_embeds" in inspect.signature(diffusers.PRXTransformer2DModel).parameters,
    "this diffusers has no PRX-7B",
)
class TestPRX7BTransformer(PRX7BTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
