import unittest

import torch
from diffusers import SanaControlNetModel, SanaTransformer2DModel

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


class SanaTransformerTesterConfig(BaseModelTesterConfig):
    """Padded text; heads of another number and size in cross-attention."""

    model_class = SanaTransformer2DModel
    without_effect = {"transformer_blocks.*.attn2.to_k.bias": "what all keys share moves no softmax"}
    cannot = dict.fromkeys(("Ulysses 2", "ring 2", "TP 2 x Ulysses 2"), "its linear attention sums")

    def get_init_dict(self):
        return {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 5,
            "attention_head_dim": 8,
            "num_layers": 2,
            "num_cross_attention_heads": 10,
            "cross_attention_head_dim": 4,
            "cross_attention_dim": 40,
            "caption_channels": 24,
            "sample_size": 6,
        }

    def get_dummy_inputs(self, batch_size=1):
        return {
            "hidden_states": randn(batch_size, 4, 5, 3, seed=1),
            "encoder_hidden_states": randn(batch_size, 7, 24, seed=2),
            "encoder_attention_mask": (torch.arange(7)[None] < torch.tensor([[5], [3]])[:batch_size]).long(),
            "timestep": torch.tensor([500.0, 250.0])[:batch_size],
        }


class SanaSprintTransformerTesterConfig(SanaTransformerTesterConfig):
    """Guidance is an input; norms of q and k; biases."""

    without_effect = {}

    def get_init_dict(self):
        return {
            **super().get_init_dict(),
            "guidance_embeds": True,
            "qk_norm": "rms_norm_across_heads",
            "attention_bias": True,
        }

    def get_dummy_inputs(self, batch_size=1):
        return {**super().get_dummy_inputs(batch_size), "guidance": torch.tensor([0.4, 0.5])[:batch_size]}


class SanaControlNetTesterConfig(SanaTransformerTesterConfig):
    """The ControlNet; of its blocks all outputs are answers."""

    model_class = SanaControlNetModel

    def get_dummy_inputs(self, batch_size=1):
        return {**super().get_dummy_inputs(batch_size), "controlnet_cond": randn(batch_size, 4, 5, 3, seed=4)}


class SanaControlledTransformerTesterConfig(SanaTransformerTesterConfig):
    """With residuals of a ControlNet."""

    def get_dummy_inputs(self, batch_size=1):
        return {
            **super().get_dummy_inputs(batch_size),
            "controlnet_block_samples": (randn(batch_size, 15, 40, seed=4),),
        }


class TestSanaControlNet(SanaControlNetTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestSanaControlledTransformer(SanaControlledTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestSanaTransformer(SanaTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestSanaSprintTransformer(SanaSprintTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
