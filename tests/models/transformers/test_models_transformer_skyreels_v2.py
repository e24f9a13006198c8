import unittest

import torch
from diffusers import SkyReelsV2Transformer3DModel

from ..testing_utils.common import randn
from ..testing_utils.plans import PlanTesterMixin
from .test_models_transformer_wan import WanImageToVideoTransformerTesterConfig, WanTransformerTesterConfig


class SkyReelsV2TransformerTesterConfig(WanImageToVideoTransformerTesterConfig):
    """Image to video."""

    model_class = SkyReelsV2Transformer3DModel


class SkyReelsV2DiffusionForcingTesterConfig(WanTransformerTesterConfig):
    """A timestep for each frame, frames per second, and attention to the blocks of frames before only."""

    model_class = SkyReelsV2Transformer3DModel

    def get_init_dict(self):
        return {**super().get_init_dict(), "inject_sample_info": True, "num_frame_per_block": 3}

    def get_dummy_inputs(self, batch_size=1):
        inputs = super().get_dummy_inputs(batch_size)
        return {
            **inputs,
            "hidden_states": randn(batch_size, 4, 9, 2, 6, seed=1),  # 27 tokens
            "timestep": torch.linspace(0, 900, 9).repeat(batch_size, 1) + 30 * torch.arange(batch_size)[:, None],
            "enable_diffusion_forcing": True,
            "fps": [1],
        }


class TestSkyReelsV2Transformer(SkyReelsV2TransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestSkyReelsV2DiffusionForcing(SkyReelsV2DiffusionForcingTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
