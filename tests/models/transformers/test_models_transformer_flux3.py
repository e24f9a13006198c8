import unittest

import diffusers
import pytest
import torch

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


if not hasattr(diffusers, "Flux3Transformer2DModel"):
    pytest.skip("this diffusers has no FLUX.3", allow_module_level=True)


class Flux3TransformerTesterConfig(BaseModelTesterConfig):
    """Text to image."""

    model_class = diffusers.Flux3Transformer2DModel
    without_effect = {
        "mode_blocks.image_cond.*": "there are no reference pictures",
        "*_stream_modulations.image_cond.*": "there are no reference pictures",
    }

    def get_init_dict(self):
        return {
            "in_channels": 16,
            "cond_in_channels": 12,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 5,
            "joint_attention_dim": 32,
            "timestep_channels": 24,
            "axes_dims_rope": (2, 2, 2, 2),
        }

    def get_dummy_inputs(self, batch_size=1):
        height, width, text = 5, 7, 11
        image_ids = torch.zeros(height, width, 4)
        image_ids[..., 1] += torch.arange(height)[:, None]
        image_ids[..., 2] += torch.arange(width)[None]
        text_ids = torch.zeros(text, 4)
        text_ids[:, 3] = torch.arange(text)
        return {
            "hidden_states": randn(batch_size, height * width, 16, seed=1),
            "encoder_hidden_states": randn(batch_size, text, 32, seed=2),
            "timestep": torch.tensor([0.5, 0.25])[:batch_size],
            "img_ids": image_ids.reshape(-1, 4),
            "txt_ids": text_ids,
        }


class Flux3EditTransformerTesterConfig(Flux3TransformerTesterConfig):
    """With a reference picture, and the timestep that a step of a distilled model jumps to."""

    without_effect = {}

    def get_init_dict(self):
        return {**super().get_init_dict(), "flow_map": True}

    def get_dummy_inputs(self, batch_size=1):
        inputs = super().get_dummy_inputs(batch_size)
        ids = inputs["img_ids"][:13].clone()
        ids[:, 0] = 10
        return {
            **inputs,
            "image_cond_hidden_states": randn(batch_size, 13, 12, seed=3),
            "image_cond_ids": ids,
            "target_timestep": torch.tensor([0.25, 0.0])[:batch_size],
        }


class TestFlux3Transformer(Flux3TransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestFlux3EditTransformer(Flux3EditTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
