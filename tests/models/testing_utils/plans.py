"""The tests that every class with plans passes: each way of being parallel against one process, on real ranks."""

import copy
import math
import statistics
from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_map_only

import diffusers_rocm
from diffusers_rocm import ParallelConfig
from diffusers_rocm.hooks.sequence_split import SequenceSplit
from diffusers_rocm.hooks.tensor_parallel import resolve
from diffusers_rocm.models.plans import get_tensor_parallel_plan
from diffusers_rocm.models.plans.verify import PlanReport

from ...testing_utils import message_of, relative_l2, run_ranks, slow
from .common import BaseModelTesterConfig, randn
from .parallelism import _clone_state, _same_state
from .workers import BF16_RATIO, FLOAT32_BAR


# Name -> degrees, and the batch size. Sequences of the tiny inputs are odd, so no split of them is even.
STRATEGIES: dict[str, tuple[dict[str, int], int]] = {
    "TP 2": ({"tp": 2}, 2),
    "Ulysses 2": ({"ulysses": 2}, 2),
    "TP 3": ({"tp": 3}, 2),
    "ring 2": ({"ring": 2}, 2),
    "TP 2 x Ulysses 2": ({"ulysses": 2, "tp": 2}, 1),
}
FAST = ("TP 2", "Ulysses 2")


@torch.no_grad()
def parity_worker(config: BaseModelTesterConfig, degrees: dict[str, int], batch_size: int) -> dict:
    model, inputs = config.get_model(), config.get_inputs(batch_size)
    reference, state = config.get_output(model, inputs), _clone_state(model)
    model.enable_parallelism(config=ParallelConfig(**degrees))
    output = config.get_output(model, inputs)
    split = model.parallelism.split
    lengths = {} if split is None else split.lengths
    model.disable_parallelism()
    return {
        "error": relative_l2(output, reference),
        "lengths": lengths,
        "restored": _same_state(model, state) and torch.equal(config.get_output(model, inputs), reference),
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()),
    }


@torch.no_grad()
def compiled_worker(config: BaseModelTesterConfig, degrees: dict[str, int], fullgraph: bool) -> float:
    torch._dynamo.reset()
    model, inputs = config.get_model(), config.get_inputs(1)
    reference = config.get_output(model, inputs)
    if degrees:
        model.enable_parallelism(config=ParallelConfig(**degrees))
    model.compile_repeated_blocks(fullgraph=fullgraph, backend="aot_eager")
    return relative_l2(config.get_output(model, inputs), reference)


@torch.no_grad()
def graphs_worker(config: BaseModelTesterConfig, degrees: dict[str, int]) -> list[int]:
    """How many graphs are compiled where each list of blocks has 1 more, and 3."""
    found = []
    for more in (1, 3):
        torch._dynamo.reset()
        counters.clear()
        model = config.get_model()
        for blocks in model.children():
            if isinstance(blocks, nn.ModuleList) and len(blocks) > 0:
                for _ in range(more):
                    blocks.insert(0, copy.deepcopy(blocks[0]))
        if degrees:
            model.enable_parallelism(config=ParallelConfig(**degrees))
        model.compile_repeated_blocks(backend="eager")
        config.get_output(model, config.get_inputs(1))
        found.append(counters["stats"]["unique_graphs"])
    return found


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    """All floating tensors of a structure as bfloat16 has them, in `dtype`."""

    def each(x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16().to(dtype) if x.is_floating_point() else x

    return tree_map_only(torch.Tensor, each, value)


@torch.no_grad()
def bf16_worker(config: BaseModelTesterConfig, degrees: dict[str, int]) -> tuple[float, float]:
    """Errors against float32 of bfloat16 in a single process, and parallel, with equal weights and inputs.

    Of several models together: of one that is tiny, the errors of two runs differ by some tens of percent.
    """
    inputs, single, parallel = config.get_inputs(2), [], []
    wide, narrow = _rounded(inputs, torch.float32), _rounded(inputs, torch.bfloat16)
    for seed in range(4):
        model = config.get_model(seed, torch.bfloat16)
        reference = config.get_output(config.get_model(seed, torch.bfloat16).float(), wide)
        single.append(relative_l2(config.get_output(model, narrow), reference))
        if degrees:
            model.enable_parallelism(config=ParallelConfig(**degrees))
        parallel.append(relative_l2(config.get_output(model, narrow), reference))
    return statistics.fmean(single), statistics.fmean(parallel)


@torch.no_grad()
def refusal_worker(
    config: BaseModelTesterConfig,
    degrees: dict[str, int],
    batch_size: int,
    further_inputs: Mapping = MappingProxyType({}),
) -> str:
    model = config.get_model()

    def run():
        model.enable_parallelism(config=ParallelConfig(**degrees))
        config.get_output(model, {**config.get_inputs(batch_size), **further_inputs})

    return message_of(run)


@torch.no_grad()
def without_communication_worker(config: BaseModelTesterConfig) -> float:
    """The error when each rank attends to its own tokens only: what a plan that misses an attention would give."""
    model, inputs = config.get_model(), config.get_inputs(1)
    reference = config.get_output(model, inputs)
    model.enable_parallelism(config=ParallelConfig(ulysses=2))

    def attend(self, q, k, v, mask=None, scale=None, is_causal=False, kernel=None):
        self.reached = True
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with torch._C.DisableTorchFunction():
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        return out.transpose(1, 2)

    original, SequenceSplit.attend = SequenceSplit.attend, attend
    try:
        return relative_l2(config.get_output(model, inputs), reference)
    finally:
        SequenceSplit.attend = original


_reports: dict[str, PlanReport] = {}


def report_of_real_size(config: type[BaseModelTesterConfig]) -> PlanReport:
    """Of the class's default model, once for all variants that have the same."""
    key = f"{config.model_class.__name__} {config.real_init_dict}"
    if key not in _reports:
        with torch.device("meta"):
            _reports[key] = diffusers_rocm.verify_plan(config.model_class(**config.real_init_dict), 2)
    return _reports[key]


class PlanTesterMixin:
    """Add to a `BaseModelTesterConfig` of a class with plans."""

    # Strategy -> part of the message, where the class has no such plan, or the inputs cannot be split.
    cannot: dict[str, str] = {}
    # What the compiler says of a single process whose blocks are no whole graph (a pattern).
    breaks: str | None = None
    # Are they none when their sequences are split? Lengths that are data say which layout they have.
    breaks_when_split = False
    # What a single process says of bfloat16 (a pattern), where it has none on a CPU.
    not_in_bf16: str | None = None
    # Does rounding choose among experts? Then bfloat16 of two kernels differs by more than rounding.
    routes = False

    @parameterized.expand([(name,) for name in FAST])
    def test_parity(self, name):
        self.check_parity(name)

    @parameterized.expand([(name,) for name in STRATEGIES if name not in FAST])
    @slow
    def test_parity_of_more_ranks(self, name):
        self.check_parity(name)

    def check_parity(self, name: str) -> float:
        """The worst error of any rank."""
        degrees, batch_size = STRATEGIES[name]
        if name in self.cannot:
            for message in run_ranks(math.prod(degrees.values()), refusal_worker, self.config, degrees, batch_size):
                assert self.cannot[name] in message, message
            return math.nan
        results = run_ranks(math.prod(degrees.values()), parity_worker, self.config, degrees, batch_size)
        for result in results:
            assert result["error"] <= FLOAT32_BAR, result
            assert result["restored"] and result["hooks"] == 0, result
            if degrees.keys() & {"ring", "ulysses"}:
                lengths = result["lengths"].values()
                assert lengths and (self.config.even_lengths or any(length % 2 for length in lengths)), result
        return max(result["error"] for result in results)

    @parameterized.expand([("TP 2",), ("Ulysses 2",), ("ring 2",)])
    @slow
    def test_compiled(self, name):
        self.check_compiled(name)

    @parameterized.expand([("TP 2",), ("Ulysses 2",), ("ring 2",)])
    @slow
    def test_more_blocks_are_no_more_graphs(self, name):
        self.check_graphs(name)

    @parameterized.expand([("TP 2",), ("Ulysses 2",), ("ring 2",)])
    @slow
    def test_bf16_of_each_class(self, name):
        if name in self.cannot or self.routes:
            return
        if self.not_in_bf16 is not None:
            with pytest.raises(Exception, match=self.not_in_bf16):
                bf16_worker(self.config, {})
            return
        for single, output in run_ranks(2, bf16_worker, self.config, STRATEGIES[name][0]):
            assert 1e-4 < single < 0.2, f"not a bf16 run: {single}"
            assert output <= BF16_RATIO * single, (output, single)

    def check_compiled(self, name: str) -> None:
        if name in self.cannot:
            return
        if self.breaks is not None:
            with pytest.raises(Exception, match=self.breaks):
                compiled_worker(self.config, {}, True)
        whole = self.breaks is None and (name == "TP 2" or not self.breaks_when_split)
        for error in run_ranks(2, compiled_worker, self.config, STRATEGIES[name][0], whole):
            assert error <= FLOAT32_BAR, error

    def check_graphs(self, name: str) -> None:
        if name in self.cannot:
            return
        try:
            alone = graphs_worker(self.config, {})
        except Exception as error:
            self.skipTest(f"a single process has no more blocks than its config says, or is not compiled: {error}")
        for found in run_ranks(2, graphs_worker, self.config, STRATEGIES[name][0]):
            assert found[1] - found[0] <= alone[1] - alone[0], (found, alone)

    def test_parity_would_fail_without_communication(self):
        if "Ulysses 2" in self.cannot:
            return
        for error in run_ranks(2, without_communication_worker, self.config):
            assert error > 100 * FLOAT32_BAR, error

    @torch.no_grad()
    @slow
    def test_every_shard_counts(self):
        """Parity says nothing of a shard that these inputs do not depend on."""
        model, inputs = self.config.get_model(), self.config.get_inputs(2)
        reference = self.config.get_output(model, inputs)
        idle = set()
        for placement in resolve(model, get_tensor_parallel_plan(type(model)), 2):
            for name, shard in placement.shards.items():
                parameter = getattr(placement.module, name)
                kept = parameter.clone()
                # No two elements alike: a norm may take away what all of them share.
                if shard.dim is None:
                    parameter += randn(*kept.shape, seed=0)
                else:
                    part = shard.take(kept, 1, 2)
                    shard.put(parameter, part + randn(*part.shape, seed=0), 1, 2)
                if relative_l2(self.config.get_output(model, inputs), reference) < 10 * FLOAT32_BAR:
                    idle.add(f"{placement.path}.{name}")
                parameter.copy_(kept)
        expected = {path for path in idle if any(fnmatchcase(path, pattern) for pattern in self.without_effect)}
        assert idle == expected, f"without effect on the output: {sorted(idle - expected)}"
        unused = [pattern for pattern in self.without_effect if not any(fnmatchcase(path, pattern) for path in idle)]
        assert not unused, f"said to be without effect, but are not: {unused}"

    def test_plan_leaves_nothing_unexplained(self):
        with torch.device("meta"):
            tiny = self.model_class(**self.get_init_dict())
        report = diffusers_rocm.verify_plan(tiny, 2)
        assert not report.unused_rules and not report.unsharded_linears, str(report)
        report = report_of_real_size(type(self.config))
        assert report.unexplained_bytes <= 0.01 * report.full_bytes, str(report)

    @property
    def config(self) -> BaseModelTesterConfig:
        """The config without the test case around it, as ranks take it."""
        return next(cls for cls in type(self).__mro__ if cls.__name__.endswith("TesterConfig"))()
