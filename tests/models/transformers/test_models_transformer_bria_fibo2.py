import unittest

import diffusers
import pytest
import torch

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


if not hasattr(diffusers, "BriaFibo2Transformer2DModel"):
    pytest.skip("this diffusers has no FIBO 2", allow_module_level=True)


class BriaFibo2TransformerTesterConfig(BaseModelTesterConfig):
    """Prompts of different lengths have gists of different lengths, which are padded; one block sees the text."""

    model_class = diffusers.BriaFibo2Transformer2DModel

    def get_init_dict(self):
        return {
            "in_channels": 4,
            "patch_size": 2,
            "dim": 5 * 8,
            "n_layers": 3,
            "n_refiner_layers": 2,
            "n_heads": 5,
            "cap_feat_dim": 24,
            "injection_layer_ids": (1,),
            "perceiver_num_layers": 2,
            "min_num_gist_tokens": 4,
            "max_num_gist_tokens": 12,
            "gist_step": 2,
            "gist_min_text_len": 2,
            "gist_max_text_len": 12,
            "axes_dims": (4, 2, 2),
            "axes_lens": (32, 16, 16),
        }

    def get_dummy_inputs(self, batch_size=1):
        mask = torch.ones(batch_size, 11, dtype=torch.bool)
        mask[0, 5:] = False
        return {
            "hidden_states": randn(batch_size, 4, 10, 14, seed=1),  # 35 tokens
            "timestep": torch.tensor([0.5, 0.25])[:batch_size],
            "encoder_hidden_states": randn(batch_size, 2, 11, 24, seed=2),
            "encoder_attention_mask": mask,
        }


class BriaFibo2EditTransformerTesterConfig(BriaFibo2TransformerTesterConfig):
    """With two pictures to edit, whose tokens are modulated as clean ones."""

    def get_dummy_inputs(self, batch_size=1):
        pictures = [randn(batch_size, 4, 6, 8, seed=3), randn(batch_size, 4, 4, 10, seed=4)]
        return {**super().get_dummy_inputs(batch_size), "context_latents": pictures}


class TestBriaFibo2Transformer(BriaFibo2TransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestBriaFibo2EditTransformer(BriaFibo2EditTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
