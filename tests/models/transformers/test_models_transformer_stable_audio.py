import unittest

import torch
from diffusers import StableAudioDiTModel

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


class StableAudioTesterConfig(BaseModelTesterConfig):
    """Fewer heads of keys than of queries in the cross-attention; masks for the sound and for the text."""

    model_class = StableAudioDiTModel

    def get_init_dict(self):
        return {
            "sample_size": 24,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 10,
            "num_key_value_attention_heads": 5,
            "cross_attention_dim": 40,
            "time_proj_dim": 16,
            "global_states_input_dim": 14,
            "cross_attention_input_dim": 18,
        }

    def get_dummy_inputs(self, batch_size=1):
        mask = torch.ones(batch_size, 24, dtype=torch.bool)
        text_mask = torch.ones(batch_size, 11, dtype=torch.bool)
        mask[0, 20:], text_mask[0, 4:] = False, False
        angles = randn(25, 2, seed=5).repeat(1, 2)
        return {
            "hidden_states": randn(batch_size, 4, 24, seed=1),  # 25 tokens, of which the first is global
            "encoder_hidden_states": randn(batch_size, 11, 18, seed=2),
            "global_hidden_states": randn(batch_size, 1, 14, seed=3),
            "timestep": torch.tensor([0.5, 0.25])[:batch_size],
            "rotary_embedding": (angles.cos(), angles.sin()),
            "attention_mask": mask,
            "encoder_attention_mask": text_mask,
        }


class TestStableAudio(StableAudioTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
