import unittest

import torch
from diffusers import HeliosTransformer3DModel

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


class HeliosTransformerTesterConfig(BaseModelTesterConfig):
    """History at three resolutions with a timestep of its own, which does not attend to the text."""

    model_class = HeliosTransformer3DModel

    def get_init_dict(self):
        return {
            "patch_size": (1, 2, 2),
            "num_attention_heads": 5,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 16,
            "freq_dim": 32,
            "ffn_dim": 72,
            "num_layers": 2,
            "rope_dim": (4, 4, 4),
        }

    def get_dummy_inputs(self, batch_size=1):
        indices = torch.arange(10).expand(batch_size, -1)
        return {
            "hidden_states": randn(batch_size, 4, 3, 6, 10, seed=1),  # 45 tokens, after 30, 6 and 2 of history
            "encoder_hidden_states": randn(batch_size, 11, 16, seed=2),
            "timestep": torch.tensor([500, 250])[:batch_size],
            "indices_hidden_states": indices[:, 7:],
            "indices_latents_history_short": indices[:, 5:7],
            "indices_latents_history_mid": indices[:, 3:5],
            "indices_latents_history_long": indices[:, :4],
            "latents_history_short": randn(batch_size, 4, 2, 6, 10, seed=3),
            "latents_history_mid": randn(batch_size, 4, 2, 6, 10, seed=4),
            "latents_history_long": randn(batch_size, 4, 4, 6, 10, seed=5),
        }


class HeliosAmplifiedTransformerTesterConfig(HeliosTransformerTesterConfig):
    """Keys of the history have a scale for each head."""

    scale_of = "per_head"

    def get_init_dict(self):
        return {**super().get_init_dict(), "is_amplify_history": True, "history_scale_mode": self.scale_of}


class HeliosAmplifiedAlikeTransformerTesterConfig(HeliosAmplifiedTransformerTesterConfig):
    """Keys of the history have a scale for all heads."""

    scale_of = "scalar"


class HeliosWithoutHistoryTransformerTesterConfig(HeliosTransformerTesterConfig):
    """Without history: all tokens attend to the text."""

    def get_init_dict(self):
        return {
            **super().get_init_dict(),
            "guidance_cross_attn": False,
            "zero_history_timestep": False,
            "has_multi_term_memory_patch": False,
        }

    def get_dummy_inputs(self, batch_size=1):
        inputs = super().get_dummy_inputs(batch_size)
        return {name: x for name, x in inputs.items() if "history" not in name}


class TestHeliosTransformer(HeliosTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestHeliosAmplifiedTransformer(HeliosAmplifiedTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestHeliosAmplifiedAlikeTransformer(
    HeliosAmplifiedAlikeTransformerTesterConfig, PlanTesterMixin, unittest.TestCase
):
    pass


class TestHeliosWithoutHistoryTransformer(
    HeliosWithoutHistoryTransformerTesterConfig, PlanTesterMixin, unittest.TestCase
):
    pass
