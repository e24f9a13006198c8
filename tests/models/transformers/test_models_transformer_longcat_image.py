import unittest

import torch
from diffusers import LongCatImageTransformer2DModel

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


class LongCatImageTransformerTesterConfig(BaseModelTesterConfig):
    model_class = LongCatImageTransformer2DModel
    sizes = 5, 7, 11  # height, width, text

    def get_init_dict(self):
        return {
            "in_channels": 16,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 5,
            "joint_attention_dim": 32,
            "axes_dims_rope": (4, 2, 2),
        }

    def get_dummy_inputs(self, batch_size=1):
        height, width, text = self.sizes
        image_ids = torch.zeros(height, width, 3)
        image_ids[..., 1] += torch.arange(height)[:, None]
        image_ids[..., 2] += torch.arange(width)[None]
        text_ids = torch.zeros(text, 3)
        text_ids[:, 1:] += torch.arange(text)[:, None]
        return {
            "hidden_states": randn(batch_size, height * width, 16, seed=1),
            "encoder_hidden_states": randn(batch_size, text, 32, seed=2),
            "timestep": torch.tensor([0.5, 0.25])[:batch_size],
            "img_ids": image_ids.reshape(-1, 3),
            "txt_ids": text_ids,
        }


class TestLongCatImageTransformer(LongCatImageTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
