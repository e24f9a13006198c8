"""Tensor-parallel tests of a model: real ranks over Gloo, each comparing with its own single process run."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from parameterized import parameterized

import diffusers_rocm
from diffusers_rocm import TensorParallelConfig
from diffusers_rocm.hooks.tensor_parallel import sharded_modules

from ...testing_utils import relative_l2, run_ranks, slow
from .common import BaseModelTesterConfig


# Parity bars: docs/numerics.md
FLOAT32_BAR = 1e-5
BF16_RATIO = 1.25


def _same_state(model, state: dict[str, torch.Tensor]) -> bool:
    now = model.state_dict()
    return now.keys() == state.keys() and all(torch.equal(now[name], value) for name, value in state.items())


def _clone_state(model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@torch.no_grad()
def parity_worker(config: BaseModelTesterConfig, tp: int, batch_size: int) -> dict:
    """Float32 error of the sharded forward, and whether disabling restores the model bit by bit."""
    model, inputs = config.get_model(), config.get_inputs(batch_size)
    reference, state = config.get_output(model, inputs), _clone_state(model)
    classes = [type(module) for module in model.modules()]
    planned = diffusers_rocm.verify_plan(model, tp).rank_bytes

    model.enable_parallelism(config=TensorParallelConfig(tp=tp))
    output = config.get_output(model, inputs)
    with torch.inference_mode():
        in_inference_mode = config.get_output(model, inputs)
    rank = model.parallelism.axes.tp.rank
    held = [*model.parameters(), *(b for name, b in model.named_buffers() if "modulation_order" not in name)]
    local = sum(tensor.numel() * tensor.element_size() for tensor in held)

    model.disable_parallelism()
    return {
        "error": relative_l2(output, reference),
        "inference_mode_equal": torch.equal(in_inference_mode, output),
        "bytes": (local, planned[rank]),
        "restored": _same_state(model, state) and [type(module) for module in model.modules()] == classes,
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()),
        "output_restored": torch.equal(config.get_output(model, inputs), reference),
    }


@torch.no_grad()
def bf16_worker(config: BaseModelTesterConfig, tp: int, autocast: bool) -> tuple[float, float]:
    """Errors against float32 of bf16 in a single process, and sharded."""
    inputs = config.get_inputs(2)
    # Weights that bf16 holds exactly, so that the error is that of the arithmetic.
    reference_model = config.get_model(dtype=torch.bfloat16).float()
    reference = config.get_output(reference_model, inputs)
    if autocast:
        model = reference_model
    else:
        model = config.get_model(dtype=torch.bfloat16)
        inputs = config.cast(inputs, torch.bfloat16)
    with torch.autocast(config.device, torch.bfloat16, enabled=autocast):
        single = config.get_output(model, inputs)
        model.enable_parallelism(config=TensorParallelConfig(tp=tp))
        sharded = config.get_output(model, inputs)
    return relative_l2(single, reference), relative_l2(sharded, reference)


def weighted_backward(config: BaseModelTesterConfig, model, inputs: dict, leaves: dict) -> dict[str, torch.Tensor]:
    """Gradients of the leaves, taken away from them, of the output under fixed random weights."""
    output = config.get_output(model, inputs)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    (output * weights.to(output.device)).sum().backward()
    grads = {name: value.grad.clone() for name, value in leaves.items()}
    for value in leaves.values():
        value.grad = None
    return grads


def gradient_worker(config: BaseModelTesterConfig, tp: int) -> dict[str, float]:
    """Relative errors of all gradients: of the inputs, and of each parameter, gathered."""
    model, inputs = config.get_model(), config.get_inputs(2)
    leaves = {name: inputs[name].requires_grad_() for name in config.floating_inputs if name in inputs}
    reference = weighted_backward(config, model, inputs, leaves)
    reference_parameters = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.enable_parallelism(config=TensorParallelConfig(tp=tp))
    sharded = weighted_backward(config, model, inputs, leaves)
    errors = {f"input {name}": relative_l2(sharded[name], reference[name]) for name in reference}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = reference_parameters.get(f"{path}.{name}")
            if full is None:
                continue
            sharding = getattr(module, "sharding", None)
            if sharding is not None and name in sharding.shards:
                full = sharding.shards[name].take(full, sharding.axis.rank, tp)
            errors[f"{path}.{name}"] = relative_l2(parameter.grad, full)
    return errors


@torch.no_grad()
def compile_worker(config: BaseModelTesterConfig, tp: int, whole: bool) -> tuple[float, list[int]]:
    """Error of the compiled, sharded forward, and the number of compiled graphs after each of three steps."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model, inputs = config.get_model(), config.get_inputs(1)
    reference = config.get_output(model, inputs)
    model.enable_parallelism(config=TensorParallelConfig(tp=tp))
    if whole:
        # Inductor's own float32 error on a whole FLUX is above the bar, in a single process too.
        model.compile(fullgraph=True, backend="aot_eager")
    else:
        model.compile_repeated_blocks(fullgraph=True)
    graphs, timestep = [], inputs["timestep"]
    for step in range(3):
        config.get_output(model, {**inputs, "timestep": timestep - 0.1 * step})
        graphs.append(counters["stats"]["unique_graphs"])
    return relative_l2(config.get_output(model, inputs), reference), graphs


@torch.no_grad()
def save_worker(config: BaseModelTesterConfig, tp: int, folder: str, max_shard_size: str) -> bool:
    """Save sharded; load with plain diffusers: is every weight bit-equal?"""
    model = config.get_model()
    state = _clone_state(model)
    model.enable_parallelism(config=TensorParallelConfig(tp=tp))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    loaded = config.model_class.from_pretrained(folder).to(config.device)
    sharded = config.model_class.from_pretrained(folder, parallel_config=TensorParallelConfig(tp=tp))
    sharded.to(config.device)
    is_sharded = next(sharded_modules(sharded), None) is not None
    sharded.disable_parallelism()
    return _same_state(loaded, state) and is_sharded and _same_state(sharded, state)


@torch.no_grad()
def different_weights_worker(config: BaseModelTesterConfig, tp: int) -> tuple[float, torch.Tensor]:
    """Ranks that start from different weights: the error against the first rank's model."""
    from torch.distributed import get_rank

    inputs = config.get_inputs(1)
    reference = config.get_output(config.get_model(seed=0), inputs)
    model = config.get_model(seed=get_rank())
    model.enable_parallelism(config=TensorParallelConfig(tp=tp))
    return relative_l2(config.get_output(model, inputs), reference)


class TensorParallelTesterMixin:
    """Add to a `BaseModelTesterConfig` of a class with a plan."""

    @parameterized.expand([(tp, batch_size) for tp in (2, 3, 4) for batch_size in (1, 2)])
    def test_parity_and_disable(self, tp, batch_size):
        for result in self.ranks(tp, parity_worker, tp, batch_size):
            assert result["error"] <= FLOAT32_BAR, result
            assert result["inference_mode_equal"], result
            assert result["bytes"][0] == result["bytes"][1], result
            assert result["restored"] and result["output_restored"] and result["hooks"] == 0, result

    @parameterized.expand([(2, False), (4, False), (2, True)])
    def test_bf16(self, tp, autocast):
        for single, sharded in self.ranks(tp, bf16_worker, tp, autocast):
            assert 1e-4 < single < 0.1, f"not a bf16 run: {single}"
            assert sharded <= BF16_RATIO * single, (sharded, single)

    @parameterized.expand([(2,), (3,)])
    def test_gradients(self, tp):
        for errors in self.ranks(tp, gradient_worker, tp):
            assert len(errors) > 10
            assert max(errors.values()) <= FLOAT32_BAR, {k: v for k, v in errors.items() if v > FLOAT32_BAR}

    @slow
    def test_compile_repeated_blocks(self):
        if not self.repeated_block_count:
            pytest.skip("the class names no repeated blocks")
        self.check_compile(2, False)

    @slow
    def test_compile_whole_model(self):
        self.check_compile(3, True)

    def check_compile(self, tp: int, whole: bool) -> None:
        for error, graphs in self.ranks(tp, compile_worker, tp, whole):
            assert error <= FLOAT32_BAR, error
            assert graphs == [graphs[0]] * 3, f"recompiled between steps: {graphs}"

    @parameterized.expand([(2, "10GB"), (3, "100KB")])
    def test_save_pretrained(self, tp, max_shard_size):
        with tempfile.TemporaryDirectory() as folder:
            assert all(self.ranks(tp, save_worker, tp, folder, max_shard_size))
            files = sorted(file.name for file in Path(folder).iterdir())
            sharded = any("-of-" in name for name in files)
            assert sharded == (max_shard_size == "100KB"), files
            assert not any(name.endswith(".partial") for name in files), files

    def test_ranks_that_start_from_different_weights(self):
        for error in self.ranks(2, different_weights_worker, 2):
            assert error <= FLOAT32_BAR, error

    def test_plan_leaves_nothing_unexplained(self):
        with torch.device("meta"):
            model, real = self.model_class(**self.get_init_dict()), self.model_class()
        report = diffusers_rocm.verify_plan(model, 2)
        assert not report.unused_rules and not report.unsharded_linears, str(report)
        report = diffusers_rocm.verify_plan(real, 2)
        assert report.unexplained_bytes <= 0.01 * report.full_bytes, str(report)

    def ranks(self, tp: int, worker: Callable, *args) -> list:
        """`worker(config, *args)` on `tp` ranks, with the config without the test case around it."""
        config = next(cls for cls in type(self).__mro__ if cls.__name__.endswith("TesterConfig"))()
        if self.device != "cpu" and tp > torch.accelerator.device_count():
            pytest.skip(f"needs {tp} accelerators, found {torch.accelerator.device_count()}")
        return run_ranks(tp, worker, config, *args, device=self.device)
