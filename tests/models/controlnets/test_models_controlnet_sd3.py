import unittest

import torch
from diffusers import SD3ControlNetModel

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


class SD3ControlNetTesterConfig(BaseModelTesterConfig):
    """With text; attention to the image alone in the first block, norms of q and k, one more channel (a mask)."""

    model_class = SD3ControlNetModel
    without_effect = {
        "transformer_blocks.1.attn.add_q_proj.*": "the text of the last block goes nowhere",
        "transformer_blocks.1.attn.to_add_out.*": "the text of the last block goes nowhere",
        "transformer_blocks.1.ff_context.*": "the text of the last block goes nowhere",
        "transformer_blocks.1.norm1_context.linear.*": "the second half is for what comes after the attention",
    }

    def get_init_dict(self):
        return {
            "sample_size": 10,
            "patch_size": 2,
            "in_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 5,
            "joint_attention_dim": 32,
            "caption_projection_dim": 40,
            "pooled_projection_dim": 24,
            "out_channels": 4,
            "dual_attention_layers": (0,),
            "qk_norm": "rms_norm",
            "extra_conditioning_channels": 1,
        }

    def get_dummy_inputs(self, batch_size=1):
        return {
            "hidden_states": randn(batch_size, 4, 10, 6, seed=1),  # 15 tokens
            "controlnet_cond": randn(batch_size, 5, 10, 6, seed=4),
            "encoder_hidden_states": randn(batch_size, 11, 32, seed=2),
            "pooled_projections": randn(batch_size, 24, seed=3),
            "timestep": torch.tensor([500.0, 250.0])[:batch_size],
        }


class SD3ControlNetWithoutTextTesterConfig(BaseModelTesterConfig):
    """Of 3.5 Large: no text, no norms of q and k, and the image comes embedded from the transformer."""

    model_class = SD3ControlNetModel
    without_effect = {
        "*.attn.to_k.bias": "the same for all keys, so softmax takes it away",
    }

    def get_init_dict(self):
        init = SD3ControlNetTesterConfig().get_init_dict()
        without = {"joint_attention_dim": None, "use_pos_embed": False, "qk_norm": None, "dual_attention_layers": ()}
        return {**init, **without, "caption_projection_dim": 32}

    def get_dummy_inputs(self, batch_size=1):
        inputs = SD3ControlNetTesterConfig().get_dummy_inputs(batch_size)
        del inputs["encoder_hidden_states"]
        return {**inputs, "hidden_states": randn(batch_size, 15, 40, seed=1)}


class TestSD3ControlNet(SD3ControlNetTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestSD3ControlNetWithoutText(SD3ControlNetWithoutTextTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
