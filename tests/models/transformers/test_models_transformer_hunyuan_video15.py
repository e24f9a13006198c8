import unittest

import torch
from diffusers import HunyuanVideo15Transformer3DModel

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


class HunyuanVideo15ImageToVideoTransformerTesterConfig(BaseModelTesterConfig):
    """Image to video: keys from an image and two texts, each with padding that the model moves to the end."""

    model_class = HunyuanVideo15Transformer3DModel
    without_effect = {
        "context_embedder.token_refiner.refiner_blocks.*.attn.to_k.bias": "adds the same to all scores of a query",
        "transformer_blocks.1.attn.add_q_proj.*": "the text of the last block goes nowhere",
        "transformer_blocks.1.attn.to_add_out.*": "the text of the last block goes nowhere",
        "transformer_blocks.1.norm1_context.linear.*": "the text of the last block goes nowhere",
        "transformer_blocks.1.ff_context.*": "the text of the last block goes nowhere",
    }

    def get_init_dict(self):
        return {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 5,
            "attention_head_dim": 10,
            "num_layers": 2,
            "num_refiner_layers": 2,
            "patch_size": 1,
            "patch_size_t": 1,
            "text_embed_dim": 16,
            "text_embed_2_dim": 12,
            "image_embed_dim": 8,
            "rope_axes_dim": (2, 4, 4),
            "target_size": 16,
        }

    def get_dummy_inputs(self, batch_size=1):
        mask, mask_2 = torch.ones(batch_size, 11, dtype=torch.long), torch.ones(batch_size, 7, dtype=torch.long)
        mask[0, 4:] = 0
        mask_2[-1, 5:] = 0
        return {
            "hidden_states": randn(batch_size, 4, 3, 3, 5, seed=1),  # 45 tokens
            "encoder_hidden_states": randn(batch_size, 11, 16, seed=2),
            "encoder_attention_mask": mask,
            "encoder_hidden_states_2": randn(batch_size, 7, 12, seed=3),
            "encoder_attention_mask_2": mask_2,
            "image_embeds": randn(batch_size, 5, 8, seed=4),
            "timestep": torch.tensor([500.0, 250.0])[:batch_size],
        }


class TestHunyuanVideo15ImageToVideoTransformer(
    HunyuanVideo15ImageToVideoTransformerTesterConfig, PlanTesterMixin, unittest.TestCase
):
    pass


class HunyuanVideo15TransformerTesterConfig(HunyuanVideo15ImageToVideoTransformerTesterConfig):
    """Text to video: a black image is no key; a second timestep, as in super-resolution."""

    def get_init_dict(self):
        return {**super().get_init_dict(), "use_meanflow": True}

    def get_dummy_inputs(self, batch_size=1):
        return {
            **super().get_dummy_inputs(batch_size),
            "image_embeds": torch.zeros(batch_size, 5, 8),
            "timestep_r": torch.tensor([400.0, 150.0])[:batch_size],
        }


class TestHunyuanVideo15Transformer(HunyuanVideo15TransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
