import unittest

import torch
from diffusers import LTXVideoTransformer3DModel

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.context_parallelism import ContextParallelTesterMixin
from ..testing_utils.plans import PlanTesterMixin


class LTXVideoTransformerTesterConfig(BaseModelTesterConfig):
    """With a mask for the text, which diffusers' context parallelism cannot take."""

    model_class = LTXVideoTransformer3DModel
    sizes = 3, 3, 5  # frames, height, width
    repeated_block_count = 1

    def get_init_dict(self):
        return {
            "in_channels": 8,
            "out_channels": 8,
            "num_attention_heads": 5,
            "attention_head_dim": 12,
            "cross_attention_dim": 60,
            "num_layers": 2,
            "caption_channels": 16,
        }

    def get_dummy_inputs(self, batch_size=1):
        mask = torch.ones(batch_size, 11, dtype=torch.long)
        mask[0, 4:] = 0
        frames, height, width = self.sizes
        return {
            "hidden_states": randn(batch_size, frames * height * width, 8, seed=1),
            "encoder_hidden_states": randn(batch_size, 11, 16, seed=2),
            "encoder_attention_mask": mask,
            "timestep": torch.tensor([500.0, 250.0])[:batch_size],
            "num_frames": frames,
            "height": height,
            "width": width,
            "rope_interpolation_scale": (0.5, 32, 32),
        }


class LTXImageToVideoTransformerTesterConfig(LTXVideoTransformerTesterConfig):
    """A timestep for each token, those of the given image are clean, and coordinates of the caller's own."""

    def get_dummy_inputs(self, batch_size=1):
        timestep = torch.full((batch_size, 45), 500.0)
        timestep[:, :15] = 0
        coordinates = 50 * randn(batch_size, 3, 45, seed=3).abs()
        return {**super().get_dummy_inputs(batch_size), "timestep": timestep, "video_coords": coordinates}


class TestLTXVideoTransformerContextParallel(
    LTXVideoTransformerTesterConfig, ContextParallelTesterMixin, unittest.TestCase
):
    pass


class TestLTXImageToVideoTransformerContextParallel(
    LTXImageToVideoTransformerTesterConfig, ContextParallelTesterMixin, unittest.TestCase
):
    pass


class TestLTXVideoTransformer(LTXVideoTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestLTXImageToVideoTransformer(LTXImageToVideoTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
