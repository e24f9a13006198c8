import unittest

import diffusers
import pytest
import torch

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


if not hasattr(diffusers, "GlmImageTransformer2DModel"):
    pytest.skip("this diffusers has no GlmImageTransformer2DModel", allow_module_level=True)


class GlmImageTransformerTesterConfig(BaseModelTesterConfig):
    """Text, and tokens drawn beforehand, some of them dropped."""

    model_class = diffusers.GlmImageTransformer2DModel

    def get_init_dict(self):
        return {
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 5,
            "text_embed_dim": 24,
            "time_embed_dim": 16,
            "condition_dim": 8,
            "prior_vq_quantizer_codebook_size": 32,
        }

    def get_dummy_inputs(self, batch_size=1):
        tokens = torch.arange(batch_size * 15).reshape(batch_size, 15)
        return {
            "hidden_states": randn(batch_size, 4, 10, 6, seed=1),  # 15 tokens
            "encoder_hidden_states": randn(batch_size, 7, 24, seed=2),
            "prior_token_id": tokens * 5 % 32,
            "prior_token_drop": tokens % 4 == 0,
            "timestep": torch.tensor([500.0, 250.0])[:batch_size],
            "target_size": torch.tensor([[40.0, 24.0], [20.0, 48.0]])[:batch_size],
            "crop_coords": torch.tensor([[0.0, 0.0], [8.0, 3.0]])[:batch_size],
        }


class GlmImageMaskedTransformerTesterConfig(GlmImageTransformerTesterConfig):
    """Padded text: a mask of queries by keys, which the processor makes of what a rank has."""

    cannot = dict.fromkeys(("Ulysses 2", "ring 2", "TP 2 x Ulysses 2"), "cannot go with attention_mask")

    def get_dummy_inputs(self, batch_size=1):
        mask = (torch.arange(7)[None] < torch.tensor([[5], [7]])[:batch_size]).long()
        return {**super().get_dummy_inputs(batch_size), "attention_mask": mask}


class GlmImageCachedTransformerTesterConfig(GlmImageTransformerTesterConfig):
    """Keys and values of a picture to edit are kept in a first forward, for a second one."""

    cannot = dict.fromkeys(("Ulysses 2", "ring 2", "TP 2 x Ulysses 2"), "cannot go with kv_caches")

    def get_output(self, model, inputs):
        caches = diffusers.models.transformers.transformer_glm_image.GlmImageKVCache(model.config.num_layers)
        caches.set_mode("write")
        batch_size = len(inputs["hidden_states"])
        for item in range(batch_size):
            first = {name: value[item : item + 1] for name, value in inputs.items()}
            model(**first, kv_caches=caches)
            caches.next_sample()
        caches.set_mode("read")
        return super().get_output(model, {**inputs, "kv_caches": caches})


class GlmImagePipelineTransformerTesterConfig(GlmImageTransformerTesterConfig):
    """Text to image as the pipeline does it: with a cache that keeps nothing; and rotations of the caller's own."""

    def get_output(self, model, inputs):
        caches = diffusers.models.transformers.transformer_glm_image.GlmImageKVCache(model.config.num_layers)
        caches.set_mode("skip")
        return super().get_output(model, {**inputs, "kv_caches": caches})

    def get_dummy_inputs(self, batch_size=1):
        angles = randn(15, 4, seed=3).repeat(1, 2)
        return {**super().get_dummy_inputs(batch_size), "image_rotary_emb": (angles.cos(), angles.sin())}


class TestGlmImagePipelineTransformer(GlmImagePipelineTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestGlmImageCachedTransformer(GlmImageCachedTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestGlmImageTransformer(GlmImageTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestGlmImageMaskedTransformer(GlmImageMaskedTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
