import unittest

import torch
from diffusers import CogVideoXTransformer3DModel

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


class CogVideoXTransformerTesterConfig(BaseModelTesterConfig):
    """1.0, 2B: positions added to the tokens."""

    model_class = CogVideoXTransformer3DModel
    without_effect = {
        "transformer_blocks.1.norm2.linear.*": "the text of the last block, the second half, goes nowhere",
    }

    def get_init_dict(self):
        return {
            "num_attention_heads": 5,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 12,
            "text_embed_dim": 16,
            "num_layers": 2,
            "sample_width": 10,
            "sample_height": 6,
            "sample_frames": 9,
            "patch_size": 2,
            "temporal_compression_ratio": 4,
            "max_text_seq_length": 11,
        }

    def get_dummy_inputs(self, batch_size=1):
        return {
            "hidden_states": randn(batch_size, 3, 4, 6, 10, seed=1),  # 45 tokens
            "encoder_hidden_states": randn(batch_size, 11, 16, seed=2),
            "timestep": torch.tensor([500, 250])[:batch_size],
        }


class CogVideoXImageToVideoTransformerTesterConfig(CogVideoXTransformerTesterConfig):
    """1.5, image to video: rotary embeddings, patches over frames, a second embedding of the step."""

    def get_init_dict(self):
        return {
            **super().get_init_dict(),
            "attention_head_dim": 8,
            "in_channels": 8,
            "ofs_embed_dim": 12,
            "patch_size_t": 2,
            "patch_bias": False,
            "use_rotary_positional_embeddings": True,
        }

    def get_dummy_inputs(self, batch_size=1):
        angles = randn(45, 4, seed=4).repeat_interleave(2, 1)
        return {
            **super().get_dummy_inputs(batch_size),
            "hidden_states": randn(batch_size, 6, 8, 6, 10, seed=1),
            "image_rotary_emb": (angles.cos(), angles.sin()),
            "ofs": torch.full((1,), 2.0),
        }


class TestCogVideoXTransformer(CogVideoXTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestCogVideoXImageToVideoTransformer(
    CogVideoXImageToVideoTransformerTesterConfig, PlanTesterMixin, unittest.TestCase
):
    pass
