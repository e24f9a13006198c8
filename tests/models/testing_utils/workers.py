"""What every way of being parallel is asked: as exact as one process in bf16, in gradients, and compiled."""

from collections.abc import Callable

import pytest
import torch

from diffusers_rocm import ContextParallelConfig, ParallelConfig, TensorParallelConfig

from ...testing_utils import relative_l2, run_ranks
from .common import BaseModelTesterConfig


# Parity bars: docs/numerics.md
FLOAT32_BAR = 1e-5
BF16_RATIO = 1.25

AnyConfig = ContextParallelConfig | ParallelConfig | TensorParallelConfig


@torch.no_grad()
def bf16_worker(config: BaseModelTesterConfig, parallel: AnyConfig, autocast: bool) -> tuple[float, float]:
    """Errors against float32 of bf16 in a single process, and parallel."""
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
        model.enable_parallelism(config=parallel)
        output = config.get_output(model, inputs)
    return relative_l2(single, reference), relative_l2(output, reference)


def weighted_backward(config: BaseModelTesterConfig, model, inputs: dict, leaves: dict) -> dict[str, torch.Tensor]:
    """Gradients of the leaves, taken away from them, of the output under fixed random weights."""
    output = config.get_output(model, inputs)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    (output * weights.to(output.device)).sum().backward()
    grads = {name: value.grad.clone() for name, value in leaves.items()}
    for value in leaves.values():
        value.grad = None
    return grads


def gradient_worker(config: BaseModelTesterConfig, parallel: AnyConfig) -> dict[str, float]:
    """Relative errors of all gradients: of the inputs; of each parameter, or what this rank has of it.

    The ranks of a sequence have each a part of the sum that a parameter's gradient is.
    """
    model, inputs = config.get_model(), config.get_inputs(2)
    leaves = {name: inputs[name].requires_grad_() for name in config.floating_inputs if name in inputs}
    reference = weighted_backward(config, model, inputs, leaves)
    parameters = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.enable_parallelism(config=parallel)
    grads = weighted_backward(config, model, inputs, leaves)
    errors = {f"input {name}": relative_l2(grads[name], reference[name]) for name in reference}
    axes = model.parallelism.axes
    split = axes.context.size > 1
    typical = sum(grad.norm() ** 2 for grad in parameters.values()) ** 0.5 / len(parameters) ** 0.5
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = parameters.get(f"{path}.{name}" if path else name)
            if full is None:
                continue
            if split:
                torch.distributed.all_reduce(parameter.grad, group=axes.context.group)
            sharding = getattr(module, "sharding", None)
            if sharding is not None and name in sharding.shards:
                full = sharding.shards[name].take(full, axes.tp.rank, axes.tp.size)
            # A gradient that is zero but for rounding (of a key's bias) is measured against a typical one.
            norm = max(full.norm(), 1e-3 * typical) if split else full.norm()
            errors[f"{path}.{name}"] = ((parameter.grad - full).norm() / norm).item()
    return errors


@torch.no_grad()
def compile_worker(
    config: BaseModelTesterConfig, parallel: AnyConfig, whole: bool, backend: str
) -> tuple[float, list[int]]:
    """Error of the compiled, parallel forward, and the number of compiled graphs after each of three steps."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model, inputs = config.get_model(), config.get_inputs(1)
    reference = config.get_output(model, inputs)
    model.enable_parallelism(config=parallel)
    if whole:
        model.compile(fullgraph=True, backend=backend)
    else:
        model.compile_repeated_blocks(fullgraph=True, backend=backend)
    graphs, timestep = [], inputs["timestep"]
    for step in range(3):
        config.get_output(model, {**inputs, "timestep": (timestep * (1 - 0.1 * step)).to(timestep.dtype)})
        graphs.append(counters["stats"]["unique_graphs"])
    return relative_l2(config.get_output(model, inputs), reference), graphs


class ParallelTesterMixin:
    """For the mixins that add ways of being parallel to a `BaseModelTesterConfig`."""

    def check_bf16(self, ranks: int, parallel: AnyConfig, autocast: bool = False) -> None:
        for single, output in self.ranks(ranks, bf16_worker, parallel, autocast):
            assert 1e-4 < single < 0.1, f"not a bf16 run: {single}"
            assert output <= BF16_RATIO * single, (output, single)

    def check_gradients(self, ranks: int, parallel: AnyConfig) -> None:
        for errors in self.ranks(ranks, gradient_worker, parallel):
            assert len(errors) > 10
            wrong = {name: error for name, error in errors.items() if not error <= FLOAT32_BAR}
            assert not wrong, wrong

    def check_compile(self, ranks: int, parallel: AnyConfig, whole: bool, backend: str = "aot_eager") -> None:
        for error, graphs in self.ranks(ranks, compile_worker, parallel, whole, backend):
            assert error <= FLOAT32_BAR, error
            assert graphs == [graphs[0]] * 3 and graphs[0] > 0, f"recompiled between steps: {graphs}"

    def ranks(self, ranks: int, worker: Callable, *args) -> list:
        """`worker(config, *args)` on that many ranks, with the config without the test case around it."""
        config = next(cls for cls in type(self).__mro__ if cls.__name__.endswith("TesterConfig"))()
        if self.device != "cpu" and ranks > torch.accelerator.device_count():
            pytest.skip(f"needs {ranks} accelerators, found {torch.accelerator.device_count()}")
        return run_ranks(ranks, worker, config, *args, device=self.device)
