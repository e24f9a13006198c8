import unittest

import torch
from diffusers import Flux2Transformer2DModel

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.context_parallelism import ContextParallelTesterMixin


class Flux2TransformerTesterConfig(BaseModelTesterConfig):
    model_class = Flux2Transformer2DModel
    repeated_block_count = 2

    def get_init_dict(self):
        return {
            "in_channels": 16,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 5,
            "joint_attention_dim": 32,
            "timestep_guidance_channels": 24,
            "axes_dims_rope": (4, 4, 4, 4),
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
            "img_ids": image_ids.reshape(1, -1, 4).expand(batch_size, -1, -1),
            "txt_ids": text_ids[None].expand(batch_size, -1, -1),
            "guidance": torch.tensor([4.0, 2.0])[:batch_size],
        }


class TestFlux2TransformerContextParallel(Flux2TransformerTesterConfig, ContextParallelTesterMixin, unittest.TestCase):
    pass
