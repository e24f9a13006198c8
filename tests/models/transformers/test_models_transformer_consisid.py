import unittest

import torch
from diffusers import ConsisIDTransformer3DModel

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


class ConsisIDTransformerTesterConfig(BaseModelTesterConfig):
    """With a face, to which the video attends after every second block; rotary embeddings."""

    model_class = ConsisIDTransformer3DModel

    without_effect = {
        "transformer_blocks.3.norm2.linear.*": "the text of the last block, the second half, goes nowhere",
    }

    def get_init_dict(self):
        return {
            "num_attention_heads": 5,
            "attention_head_dim": 12,
            "in_channels": 8,
            "out_channels": 4,
            "time_embed_dim": 12,
            "text_embed_dim": 16,
            "num_layers": 4,
            "sample_width": 10,
            "sample_height": 6,
            "sample_frames": 9,
            "max_text_seq_length": 11,
            "use_rotary_positional_embeddings": True,
            "is_train_face": True,
            "cross_attn_interval": 2,
            "cross_attn_dim_head": 6,
            "cross_attn_num_heads": 5,
            "LFE_id_dim": 10,
            "LFE_vit_dim": 14,
            "LFE_depth": 5,
            "LFE_dim_head": 4,
            "LFE_num_heads": 5,
            "LFE_num_id_token": 2,
            "LFE_num_querie": 3,
            "LFE_output_dim": 40,
            "LFE_ff_mult": 3,
            "LFE_num_scale": 5,
        }

    def get_dummy_inputs(self, batch_size=1):
        angles = randn(45, 6, seed=4).repeat_interleave(2, 1)
        return {
            "hidden_states": randn(batch_size, 3, 8, 6, 10, seed=1),  # 45 tokens
            "encoder_hidden_states": randn(batch_size, 11, 16, seed=2),
            "timestep": torch.tensor([500, 250])[:batch_size],
            "image_rotary_emb": (angles.cos(), angles.sin()),
            "id_cond": randn(batch_size, 10, seed=5),
            "id_vit_hidden": [randn(batch_size, 5, 14, seed=6 + scale) for scale in range(5)],
        }


class TestConsisIDTransformer(ConsisIDTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
