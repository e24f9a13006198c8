import unittest

import torch
from diffusers import HiDreamImageTransformer2DModel

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


class HiDreamImageTransformerTesterConfig(BaseModelTesterConfig):
    """A square image: no mask."""

    model_class = HiDreamImageTransformer2DModel
    real_init_dict = {"patch_size": 2, "caption_channels": [4096, 4096], "llama_layers": list(range(48))}
    floating_inputs = ("hidden_states", "encoder_hidden_states_t5", "encoder_hidden_states_llama3", "pooled_embeds")

    def get_init_dict(self):
        return {
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 5,
            "caption_channels": [24, 16],
            "text_emb_dim": 12,
            "num_routed_experts": 4,
            "num_activated_experts": 2,
            "axes_dims_rope": (4, 2, 2),
            "max_resolution": (10, 10),
            "llama_layers": [0, 1, 2, 2],
        }

    def get_dummy_inputs(self, batch_size=1):
        return {
            "hidden_states": randn(batch_size, 4, 10, 10, seed=1),  # 25 tokens
            "encoder_hidden_states_t5": randn(batch_size, 9, 24, seed=2),
            "encoder_hidden_states_llama3": randn(3, batch_size, 7, 16, seed=3),
            "pooled_embeds": randn(batch_size, 12, seed=4),
            "timesteps": torch.tensor([500.0, 250.0])[:batch_size],
        }


class HiDreamImageOblongTransformerTesterConfig(HiDreamImageTransformerTesterConfig):
    """15 tokens, padded to 25, and a mask that silences the keys of the rest; no experts."""

    def get_init_dict(self):
        return {**super().get_init_dict(), "num_routed_experts": 0}

    def get_dummy_inputs(self, batch_size=1):
        return {**super().get_dummy_inputs(batch_size), "hidden_states": randn(batch_size, 4, 10, 6, seed=1)}


class HiDreamImagePackedTransformerTesterConfig(HiDreamImageTransformerTesterConfig):
    """Patches that the caller made: 15 tokens, padded to 25."""

    def get_dummy_inputs(self, batch_size=1):
        ids = torch.zeros(25, 3)
        ids[:15, 1:] = torch.cartesian_prod(torch.arange(5.0), torch.arange(3.0))
        return {
            **super().get_dummy_inputs(batch_size),
            "hidden_states": randn(batch_size, 25, 16, seed=1),
            "hidden_states_masks": (torch.arange(25) < 15).float().expand(batch_size, -1),
            "img_ids": ids.expand(batch_size, -1, -1),
            "img_sizes": [(5, 3)] * batch_size,
        }


class TestHiDreamImageTransformer(HiDreamImageTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    breaks = "data-dependent"  # how many tokens go to each expert
    routes = True


class TestHiDreamImageOblongTransformer(HiDreamImageOblongTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestHiDreamImagePackedTransformer(HiDreamImagePackedTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    breaks = "data-dependent"  # how many tokens go to each expert
    routes = True
