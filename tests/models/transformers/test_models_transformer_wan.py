import unittest

import torch
from diffusers import WanTransformer3DModel

from ..testing_utils.any_mesh import AnyMeshTesterMixin
from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.context_parallelism import ContextParallelTesterMixin
from ..testing_utils.parallelism import TensorParallelTesterMixin
from ..testing_utils.plans import PlanTesterMixin


class WanTransformerTesterConfig(BaseModelTesterConfig):
    """Text to video."""

    model_class = WanTransformer3DModel
    sizes = 3, 6, 10  # frames, height, width of latents: 45 tokens
    repeated_block_count = 1

    def get_init_dict(self):
        return {
            "patch_size": (1, 2, 2),
            "num_attention_heads": 5,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 16,
            "freq_dim": 32,
            "ffn_dim": 48,
            "num_layers": 2,
            "cross_attn_norm": True,
            "qk_norm": "rms_norm_across_heads",
            "rope_max_seq_len": 32,
        }

    def get_dummy_inputs(self, batch_size=1):
        return {
            "hidden_states": randn(batch_size, 4, *self.sizes, seed=1),
            "encoder_hidden_states": randn(batch_size, 11, 16, seed=2),
            "timestep": torch.tensor([500.0, 250.0])[:batch_size],
        }


class WanImageToVideoTransformerTesterConfig(WanTransformerTesterConfig):
    """Wan 2.1 I2V: the image's tokens are keys of the cross-attention."""

    def get_init_dict(self):
        return {**super().get_init_dict(), "image_dim": 16, "added_kv_proj_dim": 60}

    floating_inputs = ("hidden_states", "encoder_hidden_states", "encoder_hidden_states_image")

    def get_dummy_inputs(self, batch_size=1):
        # The model takes the last 512 keys for the text.
        inputs = super().get_dummy_inputs(batch_size)
        inputs["encoder_hidden_states"] = randn(batch_size, 512, 16, seed=2)
        inputs["encoder_hidden_states_image"] = randn(batch_size, 7, 16, seed=3)
        return inputs


class WanTI2VTransformerTesterConfig(WanTransformerTesterConfig):
    """Wan 2.2 5B: a timestep for each token."""

    def get_dummy_inputs(self, batch_size=1):
        frames, height, width = self.sizes
        timestep = torch.full((batch_size, frames * height * width // 4), 500.0)
        timestep[:, : height * width // 4] = 0
        return {**super().get_dummy_inputs(batch_size), "timestep": timestep}


class TestWanTransformerTensorParallel(WanTransformerTesterConfig, TensorParallelTesterMixin, unittest.TestCase):
    pass


class TestWanImageToVideoTransformerTensorParallel(
    WanImageToVideoTransformerTesterConfig, TensorParallelTesterMixin, unittest.TestCase
):
    pass


class TestWanTransformerAnyMesh(WanTransformerTesterConfig, AnyMeshTesterMixin, unittest.TestCase):
    pass


class TestWanTransformerContextParallel(WanTransformerTesterConfig, ContextParallelTesterMixin, unittest.TestCase):
    pass


class TestWanImageToVideoTransformerContextParallel(
    WanImageToVideoTransformerTesterConfig, ContextParallelTesterMixin, unittest.TestCase
):
    pass


class TestWanTI2VTransformerContextParallel(
    WanTI2VTransformerTesterConfig, ContextParallelTesterMixin, unittest.TestCase
):
    pass


class TestWanTransformer(WanTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestWanImageToVideoTransformer(WanImageToVideoTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestWanTI2VTransformer(WanTI2VTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
