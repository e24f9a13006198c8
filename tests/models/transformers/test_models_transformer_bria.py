import unittest

import torch
from diffusers import BriaTransformer2DModel

from ..testing_utils.common import randn
from ..testing_utils.plans import PlanTesterMixin
from .test_models_transformer_longcat_image import LongCatImageTransformerTesterConfig


class BriaTransformerTesterConfig(LongCatImageTransformerTesterConfig):
    """With the residuals of a ControlNet."""

    model_class = BriaTransformer2DModel

    def get_dummy_inputs(self, batch_size=1):
        inputs = super().get_dummy_inputs(batch_size)
        tokens = inputs["hidden_states"].shape[1]
        return {
            **inputs,
            "timestep": torch.tensor([500.0, 250.0])[:batch_size],
            "controlnet_block_samples": [randn(batch_size, tokens, 40, seed=seed) for seed in (3, 4)],
        }


class TestBriaTransformer(BriaTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
