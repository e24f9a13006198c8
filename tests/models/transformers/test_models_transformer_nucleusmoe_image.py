import unittest

import diffusers
import pytest
import torch

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


if not hasattr(diffusers, "NucleusMoEImageTransformer2DModel"):
    pytest.skip("this diffusers has no NucleusMoEImageTransformer2DModel", allow_module_level=True)


class NucleusMoEImageTransformerTesterConfig(BaseModelTesterConfig):
    """One block without experts; two query heads for each key head; padded text."""

    model_class = diffusers.NucleusMoEImageTransformer2DModel
    cannot = dict.fromkeys(("Ulysses 2", "ring 2", "TP 2 x Ulysses 2"), "each expert chooses its tokens")

    def get_init_dict(self):
        return {
            "patch_size": 2,
            "in_channels": 8,
            "out_channels": 2,
            "num_layers": 3,
            "attention_head_dim": 8,
            "num_attention_heads": 10,
            "num_key_value_heads": 5,
            "joint_attention_dim": 24,
            "axes_dims_rope": (4, 2, 2),
            "dense_moe_strategy": "leave_first_block_dense",
            "num_experts": 4,
            "moe_intermediate_dim": 56,
            "capacity_factors": 2.0,
        }

    def get_dummy_inputs(self, batch_size=1):
        return {
            "hidden_states": randn(batch_size, 15, 8, seed=1),
            "img_shapes": [(1, 5, 3)] * batch_size,
            "encoder_hidden_states": randn(batch_size, 7, 24, seed=2),
            "encoder_hidden_states_mask": torch.arange(7)[None] < torch.tensor([[5], [3]])[:batch_size],
            "timestep": torch.tensor([0.7, 0.2])[:batch_size],
        }


class NucleusImageTransformerTesterConfig(NucleusMoEImageTransformerTesterConfig):
    """No experts."""

    cannot = {}

    def get_init_dict(self):
        return {**super().get_init_dict(), "moe_enabled": False, "num_layers": 2}


class TestNucleusMoEImageTransformer(NucleusMoEImageTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestNucleusImageTransformer(NucleusImageTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
