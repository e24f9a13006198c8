"""diffusers' caches and layerwise casting under every way of being parallel: whole loops, against one process.

A cache that skips is a decision: it must be that of one process, call by call, on every rank. TextKVCache is not here:
it is for NucleusMoEImageTransformer2DModel alone.
"""

import contextlib
import io
import itertools
import re
import unittest

import diffusers.hooks
import pytest
import torch
from diffusers import (
    DiffusionPipeline,
    FasterCacheConfig,
    FirstBlockCacheConfig,
    PyramidAttentionBroadcastConfig,
)
from diffusers.hooks import MagCacheConfig, TaylorSeerCacheConfig
from parameterized import parameterized

from diffusers_rocm import CFGParallelConfig, ParallelConfig, parallelize

from ..models.testing_utils.parallelism import FLOAT32_BAR
from ..models.transformers.test_models_transformer_flux import FluxTransformerTesterConfig
from ..models.transformers.test_models_transformer_wan import WanTransformerTesterConfig
from ..pipelines.testing_utils import PIPELINES, build, latents
from ..testing_utils import relative_l2, run_ranks, slow


STEPS = 8

BY_BRANCH = ["first block 0.8", "mag", "taylorseer", "taylorseer lite", "sea"]
# These do not ask which branch a call is of. A distilled model is one that FasterCache takes to have no branches.
ONE_STATE = ["pyramid", "faster, distilled"]
TWO_RANKS = [{"tp": 2}, {"ring": 2}, {"ulysses": 2}]
NO_SEA = None if hasattr(diffusers.hooks, "SeaCacheConfig") else "this diffusers has no SeaCache"


def cache_config(cache: str, pipe: DiffusionPipeline):
    """A config that skips some of `STEPS` steps of a tiny pipeline."""
    wan = "Wan" in type(pipe).__name__

    def timestep() -> float:
        return pipe.current_timestep

    if cache.startswith("first block"):
        return FirstBlockCacheConfig(threshold=float(cache.removeprefix("first block ")))
    if cache == "mag":
        ratios = [1.0, 1.01, 1.02, 1.03] * 2
        return MagCacheConfig(threshold=0.1, max_skip_steps=2, num_inference_steps=STEPS, mag_ratios=ratios)
    if cache == "sea":
        return diffusers.hooks.SeaCacheConfig(threshold=0.35)
    if cache.startswith("taylorseer"):
        dtype = torch.bfloat16 if "bf16" in cache else torch.float32
        # By default it finds no attention in Wan.
        found = {"cache_identifiers": [r"blocks\..*\.attn[12]"]} if wan else {}
        arguments = {"use_lite_mode": True} if "lite" in cache else found
        return TaylorSeerCacheConfig(
            cache_interval=3, disable_cache_before_step=3, taylor_factors_dtype=dtype, **arguments
        )
    if cache == "pyramid":
        return PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2,
            spatial_attention_timestep_skip_range=(100, 900),
            cross_attention_block_skip_range=3,
            cross_attention_timestep_skip_range=(100, 900),
            current_timestep_callback=timestep,
        )
    return FasterCacheConfig(
        spatial_attention_timestep_skip_range=(-1, 800),
        unconditional_batch_skip_range=3,
        unconditional_batch_timestep_skip_range=(-1, 700),
        attention_weight_callback=lambda _: 0.3,
        tensor_format="BFCHW",
        is_guidance_distilled="distilled" in cache,
        current_timestep_callback=timestep,
    )


def count_attentions(model: torch.nn.Module) -> list[int]:
    """How many attentions each call of the model computes from here on."""
    counts = []

    def count(*_) -> None:
        counts[-1] += 1

    model.register_forward_pre_hook(lambda *_: counts.append(0))
    for path, module in model.named_modules():
        if path.endswith(".to_q"):
            module.register_forward_hook(count)
    return counts


def parity_worker(name: str, cache: str, meshes: list[dict], prompts: int = 1) -> list[dict]:
    """For each mesh, the cache enabled before and after: errors, and what each call computed."""
    arguments = PIPELINES[name].call(prompts)
    single = build(name)
    single.transformer.enable_cache(cache_config(cache, single))
    alone = count_attentions(single.transformer)
    wanted, results = latents(single, arguments, steps=STEPS), []
    for degrees, cache_first in itertools.product(meshes, (True, False)):
        pipe = build(name)
        if cache_first:
            pipe.transformer.enable_cache(cache_config(cache, pipe))
        axes = parallelize(pipe, ParallelConfig(**degrees))
        if not cache_first:
            pipe.transformer.enable_cache(cache_config(cache, pipe))
        together = count_attentions(pipe.transformer)
        outputs = [latents(pipe, arguments, steps=STEPS)]
        together.clear()  # in the first step of the first run all ranks make both branches
        outputs.append(latents(pipe, arguments, steps=STEPS))
        turns = axes.cfg.size > 1 and prompts == 1 and PIPELINES[name].guidance == "two calls"
        expected = alone[axes.cfg.rank :: axes.cfg.size] if turns else list(alone)
        results.append({"mesh": str(axes), "cache_first": cache_first, "expected": expected, "computed": [*together]})
        pipe.transformer.disable_parallelism()
        outputs.append(latents(pipe, arguments, steps=STEPS))
        results[-1]["errors"] = [relative_l2(output, wanted) for output in outputs]
    return results


@torch.no_grad()
def decision_worker(mesh: dict) -> tuple[bool, bool]:
    """What the ranks decide, alone and together, where their values differ."""
    config = FluxTransformerTesterConfig()
    model, inputs = config.get_model(), config.get_inputs(1)
    model.enable_parallelism(config=ParallelConfig(**mesh))
    model.enable_cache(FirstBlockCacheConfig(threshold=0.2))
    with model.cache_context("cond"):
        model(**inputs)
        hook = model.transformer_blocks[0]._diffusers_hook.get_hook("fbc_leader_block_hook")
        moved = hook.state_manager.get_state().head_block_residual * (1 + 0.5 * torch.distributed.get_rank())
        return type(hook)._should_compute_remaining_blocks(hook, moved), hook._should_compute_remaining_blocks(moved)


@torch.no_grad()
def indicator_worker(mesh: dict) -> float:
    """SeaCache's indicator on this rank, whose latents were its own."""
    config = WanTransformerTesterConfig()
    model, inputs = config.get_model(), config.get_inputs(1)
    model.enable_parallelism(config=ParallelConfig(**mesh))
    model.enable_cache(diffusers.hooks.SeaCacheConfig())
    hook = model.blocks[0]._diffusers_hook.get_hook("sea_cache_leader_block")
    kept = []
    hook.shared_state.resolve_gate = lambda state, metadata, indicator, config: kept.append(indicator) or True
    inputs["hidden_states"] = inputs["hidden_states"] * (1 + torch.distributed.get_rank())
    with model.cache_context("cond", step_index=0, num_inference_steps=8, sigma=0.5):
        model(**inputs)
    return kept[0][0].norm().item()


@torch.no_grad()
def calibration_worker(mesh: dict | None) -> list[list[float]]:
    """The ratios that this rank prints, of one branch and then the other."""
    pipe = build("flux")
    pipe.transformer.enable_cache(MagCacheConfig(calibrate=True, num_inference_steps=3))
    if mesh:
        parallelize(pipe, ParallelConfig(**mesh))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        latents(pipe, PIPELINES["flux"].call(), steps=3)
    return [[float(x) for x in row.split(",")] for row in re.findall(r"\[([\d., e-]+)\]\n\n", printed.getvalue())]


def rounding_worker(name: str) -> float:
    """How far bf16 factors take one process from float32 ones."""
    outputs = []
    for cache in ("taylorseer", "taylorseer bf16"):
        pipe = build(name)
        pipe.transformer.enable_cache(cache_config(cache, pipe))
        outputs.append(latents(pipe, PIPELINES[name].call(), steps=STEPS))
    return relative_l2(outputs[1], outputs[0])


def refusal_worker(name: str, cache: str) -> tuple[str, int, float]:
    """The error, the calls that ran before it, and how far the pipeline is from one process without the cache."""
    pipe, arguments = build(name), PIPELINES[name].call()
    wanted = latents(pipe, arguments)
    parallelize(pipe, CFGParallelConfig(cfg=2))
    pipe.transformer.enable_cache(cache_config(cache, pipe))
    counts = count_attentions(pipe.transformer)
    with pytest.raises(ValueError) as caught:
        latents(pipe, arguments, steps=STEPS)
    calls = len(counts)
    pipe.transformer.disable_cache()
    return str(caught.value), calls, relative_l2(latents(pipe, arguments), wanted)


def cases(caches: list[str], *meshes, models: tuple[str, ...] = ("flux", "wan")) -> list[tuple]:
    """SeaCache knows no latents of FLUX."""
    named = [(name, cache) for cache in caches for name in models if cache != "sea" or name == "wan"]
    return [(name, cache, *meshes) for name, cache in named if cache != "sea" or NO_SEA is None]


def two_ranks(model: str) -> list[tuple]:
    of_branches = cases(BY_BRANCH, [*TWO_RANKS, {"cfg": 2}], models=(model,))
    return of_branches + cases(ONE_STATE, TWO_RANKS, models=(model,))


class TestCaches(unittest.TestCase):
    def check(self, world: int, *arguments) -> None:
        for results in run_ranks(world, parity_worker, *arguments):
            for result in results:
                assert result["computed"] == result["expected"], result
                assert len(set(result["expected"])) > 1, f"the cache skipped nothing: {result}"
                assert max(result["errors"]) <= FLOAT32_BAR, result

    @parameterized.expand(two_ranks("wan"))
    def test_two_ranks(self, name, cache, meshes):
        self.check(2, name, cache, meshes)

    @parameterized.expand(two_ranks("flux"))
    @slow
    def test_two_ranks_of_flux(self, name, cache, meshes):
        self.check(2, name, cache, meshes)

    def test_four_ranks_decide_by_values(self):
        self.check(4, "flux", "first block 0.8", [{"ulysses": 2, "tp": 2}])

    @parameterized.expand(cases(["first block 0.8", "sea"], [{"ulysses": 2, "tp": 2}]))
    @slow
    def test_four_ranks_decide_by_other_values(self, name, cache, meshes):
        self.check(4, name, cache, meshes)

    @parameterized.expand(cases(["mag", "taylorseer", "taylorseer lite", *ONE_STATE], [{"ulysses": 2, "tp": 2}]))
    @slow
    def test_four_ranks_decide_by_the_step(self, name, cache, meshes):
        self.check(4, name, cache, meshes)

    @parameterized.expand([(f"first block {threshold}",) for threshold in (0.3, 0.35, 0.4, 0.5, 0.6)])
    def test_first_block_of_stacked_branches(self, cache):
        """One process decides by both rows of a call, of which each rank has one."""
        self.check(2, "ltx", cache, [{"cfg": 2}])

    @parameterized.expand([("ltx", cache, 1) for cache in ("mag", "taylorseer lite", *ONE_STATE)])
    def test_stacked_branches(self, name, cache, prompts):
        self.check(2, name, cache, [{"cfg": 2}], prompts)

    @parameterized.expand([case for case in cases(["first block 0.6", "sea", *ONE_STATE]) if case[0] == "wan"])
    def test_rows_of_two_prompts(self, name, cache):
        self.check(2, name, cache, [{"cfg": 2}], 2)

    def test_taylorseer_in_bf16(self):
        self.check_rounded("wan")

    @slow
    def test_taylorseer_in_bf16_of_flux(self):
        self.check_rounded("flux")

    def check_rounded(self, name):
        """Its factors are rounded: a last bit of float32 may become one of bf16. Less than the rounding itself."""
        rounding = run_ranks(1, rounding_worker, name)[0]
        for results in run_ranks(2, parity_worker, name, "taylorseer bf16", [*TWO_RANKS, {"cfg": 2}]):
            for result in results:
                assert result["computed"] == result["expected"], result
                assert max(result["errors"]) <= 0.2 * rounding, (result, rounding)

    @parameterized.expand([({"tp": 2},), ({"ring": 2},), ({"ulysses": 2},)])
    def test_ranks_whose_values_differ_decide_together(self, mesh):
        alone, together = zip(*run_ranks(2, decision_worker, mesh), strict=True)
        assert alone == (False, True), "each rank would decide the same by itself, and the test would show nothing"
        assert together == (True, True)

    @parameterized.expand([({"tp": 2},), ({"ring": 2},)])
    @unittest.skipIf(NO_SEA, NO_SEA)
    def test_sea_cache_decides_by_the_same_latents(self, mesh):
        first, second = run_ranks(2, indicator_worker, mesh)
        assert first == second

    @parameterized.expand([({"tp": 2},), ({"ring": 2},), ({"cfg": 2},)])
    def test_mag_cache_calibrates_over_all_tokens(self, mesh):
        wanted = run_ranks(1, calibration_worker, None)[0]
        assert len(wanted) == 2 and len(wanted[0]) == 3 and wanted[0][1:] != wanted[1][1:]
        for rank, printed in enumerate(run_ranks(2, calibration_worker, mesh)):
            for ratios, expected in zip(printed, [wanted[rank]] if "cfg" in mesh else wanted, strict=True):
                assert ratios == pytest.approx(expected, rel=1e-4)

    @parameterized.expand(
        [("flux", "pyramid"), ("wan", "faster, distilled"), ("wan", "pyramid"), ("cogvideox", "faster")]
    )
    def test_what_needs_both_branches_is_refused(self, name, cache):
        """Whole FasterCache works with stacked branches only, in one process too."""
        for message, calls, error in run_ranks(2, refusal_worker, name, cache):
            assert "no rank has both; use ring, ulysses or tp" in message
            assert message.startswith("PyramidAttentionBroadcast" if cache == "pyramid" else "FasterCache")
            assert calls <= 2 and error <= FLOAT32_BAR, (calls, error)


if __name__ == "__main__":
    unittest.main()
