"""FirstBlockCache under a split sequence: all ranks decide alike, and as one process does."""

import unittest

import torch
from diffusers import FirstBlockCacheConfig
from diffusers.hooks.first_block_cache import FBCHeadBlockHook
from parameterized import parameterized

from diffusers_rocm import ContextParallelConfig

from ..models.testing_utils.parallelism import FLOAT32_BAR
from ..models.transformers.test_models_transformer_flux import FluxTransformerTesterConfig
from ..testing_utils import relative_l2, run_ranks


def steps(model, inputs, decisions: list[bool]) -> list[torch.Tensor]:
    """Outputs of three steps, of which the last two move the first image tokens alone."""
    outputs = []
    with model.cache_context("cond"):
        for step in range(3):
            moved = inputs["hidden_states"].clone()
            moved[:, :6] += step
            outputs.append(model(**{**inputs, "hidden_states": moved}, return_dict=False)[0])
            for module in model.modules():
                hook = getattr(getattr(module, "_diffusers_hook", None), "hooks", {})
                for each in hook.values():
                    if isinstance(each, FBCHeadBlockHook):
                        decisions.append(each.state_manager.get_state().should_compute)
    return outputs


@torch.no_grad()
def worker(split: tuple, threshold: float, cache_first: bool) -> tuple[list[float], list[bool], list[bool]]:
    """Errors of each step, and whether its blocks were computed, in one process and split."""
    config = FluxTransformerTesterConfig()
    inputs = config.get_dummy_inputs(1)
    single, model = config.get_model(), config.get_model()
    alone, together = [], []
    single.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    wanted = steps(single, inputs, alone)
    if cache_first:
        model.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    model.enable_parallelism(config=ContextParallelConfig(*split))
    if not cache_first:
        model.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    errors = [relative_l2(x, y) for x, y in zip(steps(model, inputs, together), wanted, strict=True)]
    model.disable_parallelism()
    model._reset_stateful_cache()
    assert relative_l2(steps(model, inputs, [])[-1], wanted[-1]) <= FLOAT32_BAR
    return errors, alone, together


@torch.no_grad()
def local_worker(split: tuple) -> list[float]:
    """How far the residual moved over this rank's tokens alone, in steps 2 and 3: what each would decide by."""
    config, ratios = FluxTransformerTesterConfig(), []
    model, inputs = config.get_model(), config.get_dummy_inputs(1)
    model.enable_parallelism(config=ContextParallelConfig(*split))
    before = None

    def watch(module, args, kwargs, output):
        nonlocal before
        residual = output[1] - kwargs["hidden_states"]
        if before is not None:
            ratios.append(((residual - before).abs().mean() / before.abs().mean()).item())
        before = residual

    model.transformer_blocks[0].register_forward_hook(watch, with_kwargs=True)
    for step in range(3):
        moved = inputs["hidden_states"].clone()
        moved[:, :6] += step
        model(**{**inputs, "hidden_states": moved}, return_dict=False)
    return ratios


class TestFirstBlockCache(unittest.TestCase):
    @parameterized.expand([((2, 1), False), ((1, 2), True)])
    def test_ranks_decide_alike_where_their_tokens_say_otherwise(self, split, cache_first):
        ratios = run_ranks(2, local_worker, split)
        (low, high) = sorted((ratios[0][0], ratios[1][0]))
        assert low < 0.8 * high, "each rank would decide the same by itself, and the test would show nothing"
        decisions = set()
        for threshold in (low + 0.02 * (high - low), high - 0.02 * (high - low)):
            for errors, alone, together in run_ranks(2, worker, split, threshold, cache_first):
                assert alone == together and alone[0], (alone, together)
                assert max(errors) <= FLOAT32_BAR, errors
                decisions.add(alone[1])
        assert decisions == {True, False}


if __name__ == "__main__":
    unittest.main()
