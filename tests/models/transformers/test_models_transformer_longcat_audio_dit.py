import unittest

import diffusers
import pytest
import torch

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


if not hasattr(diffusers, "LongCatAudioDiTTransformer"):
    pytest.skip("this diffusers has no LongCat-AudioDiT", allow_module_level=True)


class LongCatAudioDiTTesterConfig(BaseModelTesterConfig):
    """One modulation for all blocks, convolutions over the text, a sound to begin from; both masks."""

    model_class = diffusers.LongCatAudioDiTTransformer

    def get_init_dict(self):
        return {
            "dit_dim": 40,
            "dit_depth": 2,
            "dit_heads": 5,
            "dit_text_dim": 18,
            "latent_dim": 6,
            "ff_mult": 1.3,
        }

    def get_dummy_inputs(self, batch_size=1):
        text_mask = torch.ones(batch_size, 11, dtype=torch.bool)
        text_mask[0, 4:] = False
        # The end is of the last rank alone.
        mask = torch.ones(batch_size, 19, dtype=torch.bool)
        mask[0, 15:] = False
        return {
            "hidden_states": randn(batch_size, 19, 6, seed=1),
            "encoder_hidden_states": randn(batch_size, 11, 18, seed=2),
            "encoder_attention_mask": text_mask,
            "timestep": torch.tensor([0.5, 0.25])[:batch_size],
            "attention_mask": mask,
            "latent_cond": randn(batch_size, 19, 6, seed=3),
        }


class LongCatAudioDiTLocalTesterConfig(LongCatAudioDiTTesterConfig):
    """Each block has its own modulation; norms before the cross-attention, none of queries and keys; no skip."""

    def get_init_dict(self):
        return {
            **super().get_init_dict(),
            "adaln_type": "local",
            "cross_attn_norm": True,
            "qk_norm": False,
            "long_skip": False,
            "text_conv": False,
            "use_latent_condition": False,
        }

    def get_dummy_inputs(self, batch_size=1):
        return {**super().get_dummy_inputs(batch_size), "attention_mask": None, "latent_cond": None}


class LongCatAudioDiTSelfAttentionTesterConfig(LongCatAudioDiTTesterConfig):
    """The text is in the modulation alone; no biases."""

    def get_init_dict(self):
        return {**super().get_init_dict(), "cross_attn": False, "bias": False}


class TestLongCatAudioDiT(LongCatAudioDiTTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestLongCatAudioDiTLocal(LongCatAudioDiTLocalTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestLongCatAudioDiTSelfAttention(LongCatAudioDiTSelfAttentionTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
