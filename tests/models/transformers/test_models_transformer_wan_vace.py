import unittest

import torch
from diffusers import WanVACETransformer3DModel

from ..testing_utils.common import randn
from ..testing_utils.plans import PlanTesterMixin
from .test_models_transformer_wan import WanImageToVideoTransformerTesterConfig, WanTransformerTesterConfig


class WanVACETransformerTesterConfig(WanTransformerTesterConfig):
    """Two of three blocks with control; the hints have different weights, and the control video is shorter."""

    model_class = WanVACETransformer3DModel

    def get_init_dict(self):
        return {**super().get_init_dict(), "num_layers": 3, "vace_layers": [0, 2], "vace_in_channels": 6}

    def get_dummy_inputs(self, batch_size=1):
        return {
            **super().get_dummy_inputs(batch_size),
            "control_hidden_states": randn(batch_size, 6, 2, 6, 10, seed=4),
            "control_hidden_states_scale": torch.tensor([1.0, 0.6]),
        }


class WanVACEImageToVideoTransformerTesterConfig(
    WanVACETransformerTesterConfig, WanImageToVideoTransformerTesterConfig
):
    """The image's tokens are keys of the cross-attention, of the control blocks as well."""


class TestWanVACETransformer(WanVACETransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestWanVACEImageToVideoTransformer(
    WanVACEImageToVideoTransformerTesterConfig, PlanTesterMixin, unittest.TestCase
):
    pass
