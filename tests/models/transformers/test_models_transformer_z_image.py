import unittest

import torch
from diffusers import ZImageTransformer2DModel

from ...testing_utils import run_ranks
from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.parallelism import FLOAT32_BAR
from ..testing_utils.plans import PlanTesterMixin, parity_worker


Z_IMAGE_INIT = {
    "in_channels": 4,
    "dim": 5 * 8,
    "n_layers": 2,
    "n_refiner_layers": 2,
    "n_heads": 5,
    "n_kv_heads": 5,
    "cap_feat_dim": 24,
    "axes_dims": [4, 2, 2],
    "axes_lens": [256, 16, 16],
}


class ZImageTransformerTesterConfig(BaseModelTesterConfig):
    """Prompts and pictures of different sizes in a batch; the residuals of a ControlNet, which are of all tokens."""

    model_class = ZImageTransformer2DModel
    even_lengths = "the model pads each sequence to a multiple of 32"

    def get_init_dict(self):
        return Z_IMAGE_INIT

    def get_dummy_inputs(self, batch_size=1):
        image = [randn(4, 1, 10, 14, seed=1), randn(4, 1, 6, 8, seed=2)]  # 35 and 12 tokens
        text = [randn(21, 24, seed=3), randn(45, 24, seed=4)]
        tokens = 64 + 32
        return {
            "x": image[:batch_size],
            "t": torch.tensor([0.5, 0.25])[:batch_size],
            "cap_feats": text[:batch_size],
            "controlnet_block_samples": {1: randn(batch_size, tokens, 40, seed=5)},
        }


class ZImageOmniTransformerTesterConfig(ZImageTransformerTesterConfig):
    """Omni: a reference picture, as tokens and as features, and per-token modulation: its timestep is that of a clean
    picture."""

    def get_init_dict(self):
        return {**Z_IMAGE_INIT, "siglip_feat_dim": 12}

    def get_dummy_inputs(self, batch_size=1):
        pictures = [[randn(4, 1, 6, 8, seed=6), randn(4, 1, 10, 14, seed=1)] for _ in range(batch_size)]
        return {
            "x": pictures,
            "t": torch.tensor([0.5, 0.25])[:batch_size],
            "cap_feats": [
                [randn(21, 24, seed=3), randn(length, 24, seed=4), randn(5, 24, seed=7)] for length in (9, 45)
            ][:batch_size],
            "siglip_feats": [[randn(3, 4, 12, seed=8), None] for _ in range(batch_size)],
            "image_noise_mask": [[0, 1]] * batch_size,
        }


class TestZImageTransformer(ZImageTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    def test_uneven(self):
        """64 and 96 tokens over five ranks."""
        for result in run_ranks(5, parity_worker, self.config, {"ring": 5}, 2):
            assert result["error"] <= FLOAT32_BAR, result


class TestZImageOmniTransformer(ZImageOmniTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
