import unittest

import diffusers
import pytest
import torch

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


if not hasattr(diffusers, "MiniMaxH3Transformer3DModel"):
    pytest.skip("this diffusers has no MiniMax-H3", allow_module_level=True)


class MiniMaxH3TransformerTesterConfig(BaseModelTesterConfig):
    """Text, video and audio in one sequence, with three timesteps; more channels in the heads than in the tokens."""

    model_class = diffusers.MiniMaxH3Transformer3DModel

    def get_init_dict(self):
        return {
            "num_attention_heads": 5,
            "attention_head_dim": 14,
            "hidden_size": 50,
            "num_layers": 2,
            "num_refiner_layers": 2,
            "ffn_dim": 72,
            "in_channels": 3,
            "audio_in_channels": 6,
            "text_dim": 16,
            "freq_dim": 32,
            "time_embed_hidden_dim": 20,
            "time_embed_dim": 18,
            "rope_freq_dim": 2,
        }

    def get_dummy_inputs(self, batch_size=1):
        text, video, audio = torch.arange(11), torch.arange(11, 38), torch.arange(38, 45)
        tags = torch.tensor([1] * 11 + [0] * 27 + [2] * 7)
        return {
            "hidden_states": randn(batch_size, 27, 12, seed=1),
            "audio_hidden_states": randn(batch_size, 7, 6, seed=2),
            "encoder_hidden_states": randn(batch_size, 11, 16, seed=3),
            "timestep": torch.tensor([0.0, 0.7, 0.4]),
            "timestep_indices": torch.tensor([0] * 11 + [0] * 9 + [1] * 18 + [2] * 7),
            "token_tags": tags,
            "position_ids": torch.cartesian_prod(torch.arange(5), torch.arange(3), torch.arange(3)),
            "video_indices": video,
            "audio_indices": audio,
            "text_indices": text,
        }


class TestMiniMaxH3Transformer(MiniMaxH3TransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
