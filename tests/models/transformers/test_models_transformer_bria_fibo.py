import unittest

import pytest
import torch
from diffusers import BriaFiboTransformer2DModel

from ..testing_utils.common import randn
from ..testing_utils.plans import PlanTesterMixin
from .test_models_transformer_longcat_image import LongCatImageTransformerTesterConfig


class BriaFiboTransformerTesterConfig(LongCatImageTransformerTesterConfig):
    """Each block is given a layer of the text encoder."""

    model_class = BriaFiboTransformer2DModel

    def get_init_dict(self):
        return {**super().get_init_dict(), "text_encoder_dim": 12}

    def get_dummy_inputs(self, batch_size=1):
        return {
            **super().get_dummy_inputs(batch_size),
            "timestep": torch.tensor([500.0, 250.0])[:batch_size],
            "text_encoder_layers": [randn(batch_size, 11, 12, seed=seed) for seed in range(3, 7)],
        }


class BriaFiboGuidanceTransformerTesterConfig(BriaFiboTransformerTesterConfig):
    """With the scale of a distilled guidance, which is added to the embedded timestep."""

    def get_init_dict(self):
        return {**super().get_init_dict(), "guidance_embeds": True}

    def get_dummy_inputs(self, batch_size=1):
        guidance = torch.tensor([4000.0, 2000.0])[:batch_size]
        return {**super().get_dummy_inputs(batch_size), "guidance": guidance}


class TestBriaFiboTransformer(BriaFiboTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


def takes_guidance() -> bool:
    try:
        with torch.device("meta"):
            BriaFiboTransformer2DModel(num_layers=0, num_single_layers=0, guidance_embeds=True)
    except TypeError:
        return False
    return True


@pytest.mark.skipif(not takes_guidance(), reason="this diffusers cannot make a FIBO with guidance")
class TestBriaFiboGuidanceTransformer(BriaFiboGuidanceTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
