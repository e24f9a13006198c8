import unittest
from unittest import mock

import diffusers
import pytest
import torch

from diffusers_rocm import TensorParallelConfig

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin, compiled_worker
from ..testing_utils.workers import ParallelTesterMixin


if not hasattr(diffusers, "SanaWMTransformer3DModel"):
    pytest.skip("this diffusers has no SANA-WM", allow_module_level=True)


class SanaWMTransformerTesterConfig(BaseModelTesterConfig):
    """As released, but for softmax: gated linear attention, a camera's path, its rays, heads of two sizes."""

    model_class = diffusers.SanaWMTransformer3DModel
    floating_inputs = (*BaseModelTesterConfig.floating_inputs, "camera_conditions", "chunk_plucker")
    cannot = dict.fromkeys(("Ulysses 2", "ring 2", "TP 2 x Ulysses 2"), "from frame to frame")

    def get_init_dict(self):
        return {
            "in_channels": 4,
            "num_layers": 2,
            "hidden_size": 80,
            "num_attention_heads": 10,
            "linear_head_dim": 16,
            "softmax_every_n": 0,
            "chunk_plucker_channels": 6,
            "caption_channels": 24,
        }

    def get_dummy_inputs(self, batch_size=1):
        frames, height, width = 3, 3, 5
        angle = torch.linspace(-0.4, 0.5, batch_size * frames).view(batch_size, frames)
        pose = torch.eye(4).repeat(batch_size, frames, 1, 1)
        pose[..., 0, 0] = pose[..., 2, 2] = angle.cos()
        pose[..., 0, 2], pose[..., 2, 0] = angle.sin(), -angle.sin()
        pose[..., :3, 3] = 0.3 * randn(batch_size, frames, 3, seed=4)
        lens = torch.tensor([4.0, 4.5, 2.5, 1.5]).expand(batch_size, frames, 4)
        return {
            "hidden_states": randn(batch_size, 4, frames, height, width, seed=1),
            "encoder_hidden_states": randn(batch_size, 1, 7, 24, seed=2),
            "encoder_attention_mask": (torch.arange(7)[None] < torch.tensor([[5], [3]])[:batch_size]).long(),
            "timestep": torch.tensor([[0.0, 500.0, 250.0], [0.0, 750.0, 125.0]])[:batch_size, None],
            "camera_conditions": torch.cat([pose.flatten(2), lens], dim=-1),
            "chunk_plucker": randn(batch_size, 6, frames, height, width, seed=3),
        }


class SanaWMPaddedTransformerTesterConfig(SanaWMTransformerTesterConfig):
    """Frames that are padding, convolutions over q and v as well, a plain feed-forward, no q/k norm, no rays."""

    def get_init_dict(self):
        others = {"k_conv_only": False, "ffn_type": "mlp", "qk_norm": False, "use_chunk_plucker_post_attn": False}
        return {**super().get_init_dict(), **others}

    def get_dummy_inputs(self, batch_size=1):
        inputs = super().get_dummy_inputs(batch_size)
        del inputs["chunk_plucker"]
        return {**inputs, "frame_valid_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])[:batch_size]}


class SanaWMSoftmaxTransformerTesterConfig(SanaWMTransformerTesterConfig):
    """Softmax in every other block, which rounds q, k and v to bfloat16: not here, where it would tell last bits."""

    note = (
        "without the rounding of q, k and v to bfloat16 in the blocks with softmax, which makes 1/256 of a last bit: "
        "more than the bar"
    )
    without_effect = dict.fromkeys(
        (f"blocks.1.attn.{each}*" for each in ("beta_proj", "gate_proj", "A_log", "dt_bias")), "of linear attention"
    )

    def get_init_dict(self):
        return {**super().get_init_dict(), "softmax_every_n": 2}

    def get_output(self, model, inputs):
        with mock.patch.object(torch.Tensor, "bfloat16", lambda x: x):
            return super().get_output(model, inputs)


class TestSanaWMTransformer(SanaWMTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    not_in_bf16 = "bfloat16 is not supported by cpu"


class TestSanaWMPaddedTransformer(SanaWMPaddedTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    not_in_bf16 = "bfloat16 is not supported by cpu"


class TestSanaWMSoftmaxTransformer(SanaWMSoftmaxTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    not_in_bf16 = "bfloat16 is not supported by cpu"

    def check_compiled(self, name: str) -> None:
        """No single process compiles it on a CPU, where its bfloat16 is not what the compiler takes it to be."""
        with pytest.raises(Exception, match="expected scalar type torch.bfloat16"):
            compiled_worker(self.config, {}, False)


class TestSanaWMGradients(SanaWMTransformerTesterConfig, ParallelTesterMixin, unittest.TestCase):
    """Of inputs that are given, and gathered, in part."""

    def test_gradients(self):
        self.check_gradients(2, TensorParallelConfig(tp=2))


class TestSanaWMPaddedGradients(SanaWMPaddedTransformerTesterConfig, ParallelTesterMixin, unittest.TestCase):
    """Where frames are padding, each projection gathers its own."""

    def test_gradients(self):
        self.check_gradients(2, TensorParallelConfig(tp=2))
