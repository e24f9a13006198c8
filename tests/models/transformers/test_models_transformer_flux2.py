import unittest

import pytest
import torch
from diffusers import Flux2Transformer2DModel

from diffusers_rocm import TensorParallelConfig

from ...testing_utils import relative_l2, run_ranks
from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.context_parallelism import ContextParallelTesterMixin
from ..testing_utils.parallelism import FLOAT32_BAR
from ..testing_utils.plans import PlanTesterMixin


try:
    from diffusers.models.transformers.transformer_flux2 import Flux2KVAttnProcessor, Flux2KVParallelSelfAttnProcessor
except ImportError:
    Flux2KVAttnProcessor = None


class Flux2TransformerTesterConfig(BaseModelTesterConfig):
    model_class = Flux2Transformer2DModel
    sizes = 5, 7, 11  # height, width, text
    repeated_block_count = 2

    def get_init_dict(self):
        return {
            "in_channels": 16,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 5,
            "joint_attention_dim": 32,
            "timestep_guidance_channels": 24,
            "axes_dims_rope": (4, 4, 4, 4),
        }

    def get_dummy_inputs(self, batch_size=1):
        height, width, text = self.sizes
        image_ids = torch.zeros(height, width, 4)
        image_ids[..., 1] += torch.arange(height)[:, None]
        image_ids[..., 2] += torch.arange(width)[None]
        text_ids = torch.zeros(text, 4)
        text_ids[:, 3] = torch.arange(text)
        return {
            "hidden_states": randn(batch_size, height * width, 16, seed=1),
            "encoder_hidden_states": randn(batch_size, text, 32, seed=2),
            "timestep": torch.tensor([0.5, 0.25])[:batch_size],
            "img_ids": image_ids.reshape(1, -1, 4).expand(batch_size, -1, -1),
            "txt_ids": text_ids[None].expand(batch_size, -1, -1),
            "guidance": torch.tensor([4.0, 2.0])[:batch_size],
        }


class TestFlux2Transformer(Flux2TransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


@torch.no_grad()
def cached_references_worker(tp: int) -> list[float]:
    """Errors of klein's two kinds of step: the first fills a cache with keys of reference pictures, others use it."""
    config = Flux2TransformerTesterConfig()
    model, inputs = config.get_model(), config.get_inputs(2)
    references, length = 14, inputs["hidden_states"].shape[1]
    for block in model.transformer_blocks:
        block.attn.set_processor(Flux2KVAttnProcessor())
    for block in model.single_transformer_blocks:
        block.attn.set_processor(Flux2KVParallelSelfAttnProcessor())
    later = {**inputs, "hidden_states": inputs["hidden_states"][:, references:], "timestep": inputs["timestep"] / 2}
    later["img_ids"] = inputs["img_ids"][:, references:]

    def steps() -> list[torch.Tensor]:
        extract = {"kv_cache_mode": "extract", "num_ref_tokens": references, "ref_fixed_timestep": 0.1}
        first, cache = model(**inputs, **extract, return_dict=False)
        assert first.shape[1] == length - references
        return [first, model(**later, kv_cache=cache, kv_cache_mode="cached", return_dict=False)[0]]

    reference = steps()
    model.enable_parallelism(config=TensorParallelConfig(tp=tp))
    return [relative_l2(got, want) for got, want in zip(steps(), reference, strict=True)]


@pytest.mark.skipif(Flux2KVAttnProcessor is None, reason="this diffusers keeps no keys of reference pictures")
class TestFlux2CachedReferences(unittest.TestCase):
    def test_tensor_parallel(self):
        for errors in run_ranks(2, cached_references_worker, 2):
            assert max(errors) <= FLOAT32_BAR, errors


class TestFlux2TransformerContextParallel(Flux2TransformerTesterConfig, ContextParallelTesterMixin, unittest.TestCase):
    pass
