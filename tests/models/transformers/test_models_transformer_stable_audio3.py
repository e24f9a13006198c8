import unittest

import diffusers
import pytest
import torch

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


if not hasattr(diffusers, "StableAudio3DiTModel"):
    pytest.skip("this diffusers has no Stable Audio 3", allow_module_level=True)


class StableAudio3TesterConfig(BaseModelTesterConfig):
    """Inpainting: a condition for each token of sound, but for none of the memory, which ends within a rank's run."""

    model_class = diffusers.StableAudio3DiTModel

    def get_init_dict(self):
        return {
            "io_channels": 6,
            "embed_dim": 40,
            "depth": 2,
            "num_heads": 5,
            "cond_token_dim": 18,
            "global_cond_dim": 14,
            "local_add_cond_dim": 7,
            "timestep_features_dim": 16,
            "ff_mult": 1.3,
            "num_memory_tokens": 6,
        }

    def get_dummy_inputs(self, batch_size=1):
        mask = torch.ones(batch_size, 11, dtype=torch.bool)
        mask[0, 4:] = False
        return {
            "hidden_states": randn(batch_size, 6, 19, seed=1),  # and 6 of memory
            "encoder_hidden_states": randn(batch_size, 11, 18, seed=2),
            "encoder_attention_mask": mask,
            "global_hidden_states": randn(batch_size, 14, seed=3),
            "timestep": torch.tensor([0.5, 0.25])[:batch_size],
            "local_add_cond": randn(batch_size, 7, 19, seed=4),
        }


class StableAudio3PlainTesterConfig(StableAudio3TesterConfig):
    """Plain attention, no memory; patches of three."""

    def get_init_dict(self):
        return {
            **super().get_init_dict(),
            "use_differential_attention": False,
            "num_memory_tokens": 0,
            "patch_size": 3,
        }

    without_effect = {"*.to_local_embed.*": "no condition to inpaint by; patches take none"}

    def get_dummy_inputs(self, batch_size=1):
        # 15 tokens.
        inputs = {**super().get_dummy_inputs(batch_size), "hidden_states": randn(batch_size, 6, 45, seed=1)}
        return {**inputs, "local_add_cond": None}


class TestStableAudio3(StableAudio3TesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestStableAudio3Plain(StableAudio3PlainTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
