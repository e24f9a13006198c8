import unittest

import torch
from diffusers import PixArtTransformer2DModel

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


class PixArtTransformerTesterConfig(BaseModelTesterConfig):
    """Sigma."""

    model_class = PixArtTransformer2DModel
    without_effect = {"transformer_blocks.*.attn?.to_k.bias": "softmax takes no notice of what all keys share"}

    def get_init_dict(self):
        return {
            "num_attention_heads": 5,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 8,
            "num_layers": 2,
            "cross_attention_dim": 60,
            "sample_size": 10,
            "caption_channels": 18,
            "use_additional_conditions": False,
        }

    def get_dummy_inputs(self, batch_size=1):
        mask = torch.ones(batch_size, 11)
        mask[0, 4:] = 0
        return {
            "hidden_states": randn(batch_size, 4, 10, 6, seed=1),  # 15 tokens
            "encoder_hidden_states": randn(batch_size, 11, 18, seed=2),
            "encoder_attention_mask": mask,
            "timestep": torch.tensor([500.0, 250.0])[:batch_size],
        }


class FusedPixArtTransformerTesterConfig(PixArtTransformerTesterConfig):
    """Fused projections, for which one processor serves attention to the image and to the text."""

    without_effect = {
        "transformer_blocks.*.attn1.to_[qkv].*": "to_qkv is in their place",
        "transformer_blocks.*.attn2.to_[kv].*": "to_kv is in their place",
    }

    def get_model(self, *args, **kwargs):
        model = super().get_model(*args, **kwargs)
        model.fuse_qkv_projections()
        return model


class PixArtAlphaTransformerTesterConfig(PixArtTransformerTesterConfig):
    """Alpha, which is told size and aspect ratio; with a mask for the image."""

    def get_init_dict(self):
        return {**super().get_init_dict(), "use_additional_conditions": True}

    def get_dummy_inputs(self, batch_size=1):
        mask = torch.ones(batch_size, 15)
        mask[0, 13:] = 0
        return {
            **super().get_dummy_inputs(batch_size),
            "attention_mask": mask,
            "added_cond_kwargs": {
                "resolution": torch.tensor([[80.0, 48.0], [96.0, 64.0]])[:batch_size],
                "aspect_ratio": torch.tensor([[1.7], [1.5]])[:batch_size],
            },
        }


class TestPixArtTransformer(PixArtTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestFusedPixArtTransformer(FusedPixArtTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestPixArtAlphaTransformer(PixArtAlphaTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
