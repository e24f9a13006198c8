import math
import unittest

import diffusers
import pytest
import torch
from parameterized import parameterized

from diffusers_rocm import ContextParallelConfig, ParallelConfig

from ...testing_utils import message_of, relative_l2, run_ranks
from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.parallelism import FLOAT32_BAR
from ..testing_utils.plans import PlanTesterMixin
from ..testing_utils.workers import ParallelTesterMixin


if not hasattr(diffusers, "QwenImage21Transformer2DModel"):
    pytest.skip("this diffusers has no Qwen-Image 2.1", allow_module_level=True)


class QwenImage21TransformerTesterConfig(BaseModelTesterConfig):
    """Text, a reference picture, text, and the picture; prompts of different lengths."""

    model_class = diffusers.QwenImage21Transformer2DModel
    even_lengths = "each slot of a picture stands for four tokens"

    def get_init_dict(self):
        return {
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 5,
            "context_in_dim": 32,
            "axes_dims_rope": (4, 6, 6),
        }

    def get_dummy_inputs(self, batch_size=1):
        slots = torch.zeros(batch_size, 12 + 15, dtype=torch.bool)  # of four tokens of a picture each
        slots[:, 5:8] = slots[:, 12:] = True
        mask = torch.ones(batch_size, 12, dtype=torch.bool)
        mask[0, 10:] = False
        return {
            "hidden_states": randn(batch_size, 12 + 60, 16, seed=1),
            "encoder_hidden_states": randn(batch_size, 12, 32, seed=2),
            "encoder_hidden_states_mask": mask,
            "timestep": torch.tensor([0.5, 0.25])[:batch_size],
            "img_shapes": [[(1, 2, 6), (1, 6, 10)]] * batch_size,
            "img_mask": slots,
        }


class TestQwenImage21Transformer(QwenImage21TransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class QwenImage21TextTransformerTesterConfig(QwenImage21TransformerTesterConfig):
    """Text alone, without padding, and the real step for all tokens."""

    def get_init_dict(self):
        return {**super().get_init_dict(), "causal_condition": False}

    def get_dummy_inputs(self, batch_size=1):
        inputs = super().get_dummy_inputs(batch_size)
        slots = torch.arange(7 + 15) >= 7
        return {
            "hidden_states": inputs["hidden_states"][:, 12:],
            "encoder_hidden_states": inputs["encoder_hidden_states"][:, :7],
            "timestep": inputs["timestep"],
            "img_shapes": [[(1, 6, 10)]] * batch_size,
            "img_mask": slots.expand(batch_size, -1),
        }


class TestQwenImage21TextTransformer(QwenImage21TextTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestQwenImage21Gradients(QwenImage21TransformerTesterConfig, ParallelTesterMixin, unittest.TestCase):
    """Of what every rank computes, the text and the reference picture, a rank has its share."""

    @parameterized.expand([(1, 2), (2, 1)])
    def test_gradients(self, ring, ulysses):
        self.check_gradients(2, ContextParallelConfig(ring, ulysses))


@torch.no_grad()
def cache_worker(degrees: dict[str, int]) -> list[float]:
    """Errors of a step that fills the cache with the keys of all but the picture, and of one that uses it."""
    from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

    config = QwenImage21TransformerTesterConfig()
    model, inputs = config.get_model(), config.get_inputs(2)

    def steps() -> list[torch.Tensor]:
        cache = QwenImage21KVCache(len(model.transformer_blocks))
        later = {**inputs, "timestep": inputs["timestep"] / 2}
        modes = [(inputs, "extract"), (later, "cached")]
        return [model(**each, kv_cache=cache, kv_cache_mode=mode, return_dict=False)[0] for each, mode in modes]

    reference = steps()
    assert reference[1].shape[1] == 60
    model.enable_parallelism(config=ParallelConfig(**degrees))
    return [relative_l2(got, want) for got, want in zip(steps(), reference, strict=True)]


class TestQwenImage21Cache(unittest.TestCase):
    @parameterized.expand([({"tp": 2},), ({"ulysses": 2},), ({"ring": 3},), ({"ring": 2, "ulysses": 2},)])
    def test_steps(self, degrees):
        for errors in run_ranks(math.prod(degrees.values()), cache_worker, degrees):
            assert max(errors) <= FLOAT32_BAR, errors


@torch.no_grad()
def flex_worker() -> str:
    from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21FlexAttnProcessor

    config = QwenImage21TransformerTesterConfig()
    model, inputs = config.get_model(), config.get_inputs(1)
    model.set_attn_processor(QwenImage21FlexAttnProcessor())
    model.enable_parallelism(config=ParallelConfig(ulysses=2))
    return message_of(lambda: config.get_output(model, inputs))


class TestQwenImage21FlexAttention(unittest.TestCase):
    def test_context_parallel_is_refused(self):
        assert all("flex attention" in message for message in run_ranks(2, flex_worker))
