import unittest

import torch
from diffusers import HunyuanVideoTransformer3DModel

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.context_parallelism import ContextParallelTesterMixin
from ..testing_utils.plans import PlanTesterMixin


class HunyuanVideoTransformerTesterConfig(BaseModelTesterConfig):
    """With a mask over the joined sequence, which the model makes."""

    model_class = HunyuanVideoTransformer3DModel
    repeated_block_count = 2
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
        }

    def get_dummy_inputs(self, batch_size=1):
        mask = torch.ones(batch_size, 11, dtype=torch.long)
        mask[0, 4:] = 0
        return {
            "hidden_states": randn(batch_size, 4, 3, 6, 10, seed=1),  # 45 tokens
            "encoder_hidden_states": randn(batch_size, 11, 16, seed=2),
            "encoder_attention_mask": mask,
            "pooled_projections": randn(batch_size, 8, seed=3),
            "timestep": torch.tensor([500, 250])[:batch_size],
            "guidance": torch.tensor([4000.0, 2000.0])[:batch_size],
        }


class TestHunyuanVideoTransformerContextParallel(
    HunyuanVideoTransformerTesterConfig, ContextParallelTesterMixin, unittest.TestCase
):
    pass


class TestHunyuanVideoTransformer(HunyuanVideoTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class HunyuanVideoTokenReplaceTransformerTesterConfig(HunyuanVideoTransformerTesterConfig):
    """Image to video: the first frame's 15 of 45 tokens are modulated by themselves."""

    def get_init_dict(self):
        return {**super().get_init_dict(), "image_condition_type": "token_replace"}


class TestHunyuanVideoTokenReplaceTransformerContextParallel(
    HunyuanVideoTokenReplaceTransformerTesterConfig, ContextParallelTesterMixin, unittest.TestCase
):
    pass


class TestHunyuanVideoTokenReplaceTransformer(
    HunyuanVideoTokenReplaceTransformerTesterConfig, PlanTesterMixin, unittest.TestCase
):
    pass


class HunyuanVideoLatentConcatTransformerTesterConfig(HunyuanVideoTransformerTesterConfig):
    """Image to video: the image in more channels; without guidance, as its checkpoint."""

    def get_init_dict(self):
        return {
            **super().get_init_dict(),
            "in_channels": 9,
            "guidance_embeds": False,
            "image_condition_type": "latent_concat",
        }

    def get_dummy_inputs(self, batch_size=1):
        inputs = super().get_dummy_inputs(batch_size)
        del inputs["guidance"]
        return {**inputs, "hidden_states": randn(batch_size, 9, 3, 6, 10, seed=1)}


class TestHunyuanVideoLatentConcatTransformer(
    HunyuanVideoLatentConcatTransformerTesterConfig, PlanTesterMixin, unittest.TestCase
):
    pass
