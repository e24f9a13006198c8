"""Tests of a model under several ways of being parallel at once: real ranks over Gloo."""

import math
from collections.abc import Callable

import torch
from parameterized import parameterized

from diffusers_rocm import ParallelConfig

from ...testing_utils import relative_l2, run_ranks, slow
from .common import BaseModelTesterConfig
from .parallelism import BF16_RATIO, FLOAT32_BAR, _clone_state, _same_state, weighted_backward


# (ring, ulysses, tp)
HYBRIDS = [(1, 2, 2), (2, 1, 2), (2, 2, 2), (3, 1, 2), (2, 1, 3)]


def hybrid(shape: tuple[int, int, int], **changes) -> ParallelConfig:
    return ParallelConfig(**dict(zip(("ring", "ulysses", "tp"), shape, strict=True)), **changes)


@torch.no_grad()
def parity_worker(config: BaseModelTesterConfig, shape: tuple, batch_size: int, rotate_method: str) -> dict:
    model, inputs = config.get_model(), config.get_inputs(batch_size)
    reference, state = config.get_output(model, inputs), _clone_state(model)
    model.enable_parallelism(config=hybrid(shape, rotate_method=rotate_method))
    output = config.get_output(model, inputs)
    model.disable_parallelism()
    return {
        "error": relative_l2(output, reference),
        "restored": _same_state(model, state),
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()),
        "output_restored": torch.equal(config.get_output(model, inputs), reference),
    }


@torch.no_grad()
def bf16_worker(config: BaseModelTesterConfig, shape: tuple) -> tuple[float, float]:
    """Errors against float32 of bf16 in a single process, and parallel."""
    inputs = config.get_inputs(2)
    reference = config.get_output(config.get_model(dtype=torch.bfloat16).float(), inputs)
    model = config.get_model(dtype=torch.bfloat16)
    inputs = config.cast(inputs, torch.bfloat16)
    single = config.get_output(model, inputs)
    model.enable_parallelism(config=hybrid(shape))
    return relative_l2(single, reference), relative_l2(config.get_output(model, inputs), reference)


def gradient_worker(config: BaseModelTesterConfig, shape: tuple) -> dict[str, float]:
    """Relative errors of the gradients: of the inputs; of the parameters, summed over the ranks of a sequence."""
    model, inputs = config.get_model(), config.get_inputs(2)
    leaves = {name: inputs[name].requires_grad_() for name in config.floating_inputs if name in inputs}
    reference = weighted_backward(config, model, inputs, leaves)
    parameters = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.enable_parallelism(config=hybrid(shape))
    grads = weighted_backward(config, model, inputs, leaves)
    errors = {f"input {name}": relative_l2(grad, reference[name]) for name, grad in grads.items()}
    scale = sum(grad.norm() ** 2 for grad in parameters.values()) ** 0.5 / len(parameters) ** 0.5
    axes = model.parallelism.axes
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = parameters.get(f"{path}.{name}" if path else name)
            if full is None:
                continue
            torch.distributed.all_reduce(parameter.grad, group=axes.context.group)
            sharding = getattr(module, "sharding", None)
            if sharding is not None and name in sharding.shards:
                full = sharding.shards[name].take(full, axes.tp.rank, axes.tp.size)
            # A gradient that is zero but for rounding (of a key's bias) is measured against a typical one.
            norm = max(full.norm(), 1e-3 * scale)
            errors[f"{path}.{name}"] = ((parameter.grad - full).norm() / norm).item()
    return errors


@torch.no_grad()
def compile_worker(config: BaseModelTesterConfig, shape: tuple) -> tuple[float, list[int]]:
    """Error of the compiled, parallel forward, and the number of compiled graphs after each of three steps."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model, inputs = config.get_model(), config.get_inputs(1)
    reference = config.get_output(model, inputs)
    model.enable_parallelism(config=hybrid(shape))
    model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    graphs = []
    for _ in range(3):
        config.get_output(model, inputs)
        graphs.append(counters["stats"]["unique_graphs"])
    return relative_l2(config.get_output(model, inputs), reference), graphs


class AnyMeshTesterMixin:
    """Add to a `BaseModelTesterConfig` of a class with both plans."""

    @parameterized.expand([(shape, 1 + index % 2) for index, shape in enumerate(HYBRIDS[:3])])
    def test_parity_and_disable(self, shape, batch_size):
        self.check_parity(shape, batch_size)

    @parameterized.expand([(shape, 1 + index % 2) for index, shape in enumerate(HYBRIDS[3:])])
    @slow
    def test_parity_and_disable_uneven(self, shape, batch_size):
        self.check_parity(shape, batch_size)

    def check_parity(self, shape, batch_size):
        for method in ("p2p", "allgather")[: 1 + (shape[0] > 1)]:
            for result in self.ranks(shape, parity_worker, shape, batch_size, method):
                assert result["error"] <= FLOAT32_BAR, result
                assert result["restored"] and result["output_restored"] and result["hooks"] == 0, result

    @parameterized.expand([((1, 2, 2),)])
    def test_bf16(self, shape):
        for single, parallel in self.ranks(shape, bf16_worker, shape):
            assert 1e-4 < single < 0.1, f"not a bf16 run: {single}"
            assert parallel <= BF16_RATIO * single, (parallel, single)

    @parameterized.expand([((2, 1, 2),)])
    def test_gradients(self, shape):
        for errors in self.ranks(shape, gradient_worker, shape):
            assert len(errors) > 10
            assert max(errors.values()) <= FLOAT32_BAR, {k: v for k, v in errors.items() if v > FLOAT32_BAR}

    @parameterized.expand([((1, 2, 2),)])
    def test_compile(self, shape):
        for error, graphs in self.ranks(shape, compile_worker, shape):
            assert error <= FLOAT32_BAR, error
            assert graphs == [graphs[0]] * 3 and graphs[0] > 0, f"recompiled between steps: {graphs}"

    def ranks(self, shape: tuple, worker: Callable, *args) -> list:
        """`worker(config, *args)` on the ranks of the mesh, with the config without the test case around it."""
        config = next(cls for cls in type(self).__mro__ if cls.__name__.endswith("TesterConfig"))()
        return run_ranks(math.prod(shape), worker, config, *args)
