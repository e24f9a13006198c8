import unittest

import pytest
import torch
from diffusers import BriaFiboTransformer2DModel

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


class BriaFiboTransformerTesterConfig(BaseModelTesterConfig):
    """Each block is given a layer of the text encoder."""

    model_class = BriaFiboTransformer2DModel

    def get_init_dict(self):
        return {
            "in_channels": 16,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 5,
            "joint_attention_dim": 32,
            "axes_dims_rope": (4, 2, 2),
            "text_encoder_dim": 12,
        }

    def get_dummy_inputs(self, batch_size=1):
        height, width, text = 5, 7, 11
        image_ids = torch.zeros(height, width, 3)
        image_ids[..., 1] += torch.arange(height)[:, None]
        image_ids[..., 2] += torch.arange(width)[None]
        text_ids = torch.zeros(text, 3)
        text_ids[:, 1:] += torch.arange(text)[:, None]
        return {
            "hidden_states": randn(batch_size, height * width, 16, seed=1),
            "encoder_hidden_states": randn(batch_size, text, 32, seed=2),
            "timestep": torch.tensor([500.0, 250.0])[:batch_size],
            "img_ids": image_ids.reshape(-1, 3),
            "txt_ids": text_ids,
            "text_encoder_layers": [randn(batch_size, text, 12, seed=seed) for seed in range(3, 7)],
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
