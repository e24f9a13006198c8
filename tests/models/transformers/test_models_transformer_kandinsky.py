import unittest

import torch
from diffusers import Kandinsky5Transformer3DModel

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


class Kandinsky5TransformerTesterConfig(BaseModelTesterConfig):
    """Image to video, with more input channels."""

    model_class = Kandinsky5Transformer3DModel

    def get_init_dict(self):
        return {
            "in_visual_dim": 4,
            "in_text_dim": 16,
            "in_text_dim2": 12,
            "time_dim": 14,
            "out_visual_dim": 4,
            "patch_size": (1, 2, 2),
            "model_dim": 60,
            "ff_dim": 72,
            "num_text_blocks": 2,
            "num_visual_blocks": 2,
            "axes_dims": (4, 4, 4),
            "visual_cond": True,
        }

    def get_dummy_inputs(self, batch_size=1):
        return {
            "hidden_states": randn(batch_size, 3, 6, 10, 9, seed=1),  # 45 tokens
            "encoder_hidden_states": randn(batch_size, 11, 16, seed=2),
            "pooled_projections": randn(batch_size, 12, seed=3),
            "timestep": torch.tensor([500.0, 250.0])[:batch_size],
            "visual_rope_pos": [torch.arange(3), torch.arange(3), torch.arange(5)],
            "text_rope_pos": torch.arange(11),
            "scale_factor": (1.0, 2.0, 2.0),
        }


class TestKandinsky5Transformer(Kandinsky5TransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    not_in_bf16 = "must have the same dtype"
