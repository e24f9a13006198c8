import unittest

import torch
from diffusers import Lumina2Transformer2DModel

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


class Lumina2TransformerTesterConfig(BaseModelTesterConfig):
    """Three queries share a key; samples of a batch have prompts of different lengths, so the joined one is padded."""

    model_class = Lumina2Transformer2DModel

    def get_init_dict(self):
        return {
            "patch_size": 2,
            "in_channels": 4,
            "hidden_size": 15 * 8,
            "num_layers": 2,
            "num_refiner_layers": 2,
            "num_attention_heads": 15,
            "num_kv_heads": 5,
            "multiple_of": 6,
            "ffn_dim_multiplier": 0.3,
            "axes_dim_rope": (4, 2, 2),
            "axes_lens": (64, 16, 16),
            "cap_feat_dim": 24,
        }

    def get_dummy_inputs(self, batch_size=1):
        mask = torch.ones(batch_size, 12, dtype=torch.long)
        mask[0, 8:] = 0
        return {
            "hidden_states": randn(batch_size, 4, 10, 14, seed=1),  # 35 tokens
            "timestep": torch.tensor([0.5, 0.25])[:batch_size],
            "encoder_hidden_states": randn(batch_size, 12, 24, seed=2),
            "encoder_attention_mask": mask,
        }


class TestLumina2Transformer(Lumina2TransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
