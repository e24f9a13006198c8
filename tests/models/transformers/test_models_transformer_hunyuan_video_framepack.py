import unittest

import torch
from diffusers import HunyuanVideoFramepackTransformer3DModel

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


class HunyuanVideoFramepackTransformerTesterConfig(BaseModelTesterConfig):
    """History at three resolutions before the latents; an image before the text, which a batch of one cuts."""

    model_class = HunyuanVideoFramepackTransformer3DModel
    without_effect = {
        "context_embedder.token_refiner.refiner_blocks.*.attn.to_k.bias": "adds the same to all scores of a query",
    }

    def get_init_dict(self):
        return {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 5,
            "attention_head_dim": 10,
            "num_layers": 2,
            "num_single_layers": 2,
            "num_refiner_layers": 2,
            "patch_size": 2,
            "patch_size_t": 1,
            "guidance_embeds": True,
            "text_embed_dim": 16,
            "pooled_projection_dim": 8,
            "rope_axes_dim": (2, 4, 4),
            "has_image_proj": True,
            "image_proj_dim": 12,
            "has_clean_x_embedder": True,
        }

    def get_dummy_inputs(self, batch_size=1):
        mask = torch.ones(batch_size, 11, dtype=torch.long)
        mask[0, 6:] = 0
        return {
            "hidden_states": randn(batch_size, 4, 3, 6, 10, seed=1),  # 45 tokens, after 30, 6 and 2 of history
            "encoder_hidden_states": randn(batch_size, 11, 16, seed=2),
            "encoder_attention_mask": mask,
            "pooled_projections": randn(batch_size, 8, seed=3),
            "image_embeds": randn(batch_size, 5, 12, seed=4),
            "indices_latents": torch.arange(7, 10),
            "latents_clean": randn(batch_size, 4, 2, 6, 10, seed=5),
            "indices_latents_clean": torch.tensor([0, 6]),
            "latents_history_2x": randn(batch_size, 4, 2, 6, 10, seed=6),
            "indices_latents_history_2x": torch.arange(4, 6),
            "latents_history_4x": randn(batch_size, 4, 4, 6, 10, seed=7),
            "indices_latents_history_4x": torch.arange(0, 4),
            "timestep": torch.tensor([500, 250])[:batch_size],
            "guidance": torch.tensor([4000.0, 2000.0])[:batch_size],
        }


class TestHunyuanVideoFramepackTransformer(
    HunyuanVideoFramepackTransformerTesterConfig, PlanTesterMixin, unittest.TestCase
):
    pass
