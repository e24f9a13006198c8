"""Context-parallel tests of a model: real ranks over Gloo, each comparing with its own single process run."""

from collections.abc import Callable

import pytest
import torch
from parameterized import parameterized

from diffusers_rocm import ContextParallelConfig

from ...testing_utils import relative_l2, run_ranks, slow
from .common import BaseModelTesterConfig
from .parallelism import BF16_RATIO, FLOAT32_BAR, _clone_state, _same_state, weighted_backward


# (ring, ulysses, rotate_method)
SPLITS = [(2, 1, "p2p"), (3, 1, "p2p"), (2, 1, "allgather"), (1, 2, "p2p"), (1, 3, "p2p"), (2, 2, "p2p")]


def enable(model, split: tuple, **kwargs) -> None:
    ring, ulysses, rotate_method = split
    model.enable_parallelism(config=ContextParallelConfig(ring, ulysses, rotate_method=rotate_method), **kwargs)


@torch.no_grad()
def parity_worker(config: BaseModelTesterConfig, split: tuple, batch_size: int) -> dict:
    model, inputs = config.get_model(), config.get_inputs(batch_size)
    reference, state = config.get_output(model, inputs), _clone_state(model)
    enable(model, split)
    output = config.get_output(model, inputs)
    with torch.inference_mode():
        again = config.get_output(model, inputs)
    same_weights = _same_state(model, state)
    model.disable_parallelism()
    return {
        "error": relative_l2(output, reference),
        "inference_mode_equal": torch.equal(again, output),
        "weights": same_weights and _same_state(model, state),
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()),
        "output_restored": torch.equal(config.get_output(model, inputs), reference),
    }


@torch.no_grad()
def bf16_worker(config: BaseModelTesterConfig, split: tuple) -> tuple[float, float]:
    """Errors against float32 of bf16 in a single process, and split."""
    inputs = config.get_inputs(2)
    reference = config.get_output(config.get_model(dtype=torch.bfloat16).float(), inputs)
    model = config.get_model(dtype=torch.bfloat16)
    inputs = config.cast(inputs, torch.bfloat16)
    single = config.get_output(model, inputs)
    enable(model, split)
    return relative_l2(single, reference), relative_l2(config.get_output(model, inputs), reference)


def gradient_worker(config: BaseModelTesterConfig, split: tuple) -> dict[str, float]:
    """Relative errors of the gradients: of the inputs, and of each parameter, summed over the ranks."""
    model, inputs = config.get_model(), config.get_inputs(2)
    leaves = {name: inputs[name].requires_grad_() for name in config.floating_inputs if name in inputs}
    reference = weighted_backward(config, model, inputs, leaves)
    parameters = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    enable(model, split)
    split_grads = weighted_backward(config, model, inputs, leaves)
    errors = {f"input {name}": relative_l2(grad, reference[name]) for name, grad in split_grads.items()}
    scale = sum(grad.norm() ** 2 for grad in parameters.values()) ** 0.5 / len(parameters) ** 0.5
    for name, parameter in model.named_parameters():
        if name in parameters:
            torch.distributed.all_reduce(parameter.grad, group=model.parallelism.axes.context.group)
            # A gradient that is zero but for rounding (of a key's bias) is measured against a typical one.
            norm = max(parameters[name].norm(), 1e-3 * scale)
            errors[name] = ((parameter.grad - parameters[name]).norm() / norm).item()
    return errors


@torch.no_grad()
def compile_worker(config: BaseModelTesterConfig, split: tuple, whole: bool) -> tuple[float, list[int]]:
    """Error of the compiled, split forward, and the number of compiled graphs after each of three steps."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model, inputs = config.get_model(), config.get_inputs(1)
    reference = config.get_output(model, inputs)
    enable(model, split)
    if whole:
        model.compile(fullgraph=True, backend="aot_eager")
    else:
        model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    graphs = []
    for _ in range(3):
        config.get_output(model, inputs)
        graphs.append(counters["stats"]["unique_graphs"])
    return relative_l2(config.get_output(model, inputs), reference), graphs


class ContextParallelTesterMixin:
    """Add to a `BaseModelTesterConfig` of a class with a context-parallel plan."""

    @parameterized.expand([(split, 1 + index % 2) for index, split in enumerate(SPLITS)])
    def test_parity_and_disable(self, split, batch_size):
        for result in self.ranks(split, parity_worker, split, batch_size):
            assert result["error"] <= FLOAT32_BAR, result
            assert result["inference_mode_equal"] and result["weights"], result
            assert result["output_restored"] and result["hooks"] == 0, result

    @parameterized.expand([((2, 1, "p2p"),), ((1, 2, "p2p"),)])
    def test_bf16(self, split):
        for single, parallel in self.ranks(split, bf16_worker, split):
            assert 1e-4 < single < 0.1, f"not a bf16 run: {single}"
            assert parallel <= BF16_RATIO * single, (parallel, single)

    @parameterized.expand([((3, 1, "p2p"),), ((1, 2, "p2p"),)])
    def test_gradients(self, split):
        for errors in self.ranks(split, gradient_worker, split):
            assert len(errors) > 10
            assert max(errors.values()) <= FLOAT32_BAR, {k: v for k, v in errors.items() if v > FLOAT32_BAR}

    @slow
    def test_compile_repeated_blocks(self):
        if not self.repeated_block_count:
            pytest.skip("the class names no repeated blocks")
        self.check_compile((2, 1, "p2p"), False)

    @slow
    def test_compile_whole_model(self):
        self.check_compile((1, 2, "p2p"), True)

    def check_compile(self, split: tuple, whole: bool) -> None:
        for error, graphs in self.ranks(split, compile_worker, split, whole):
            assert error <= FLOAT32_BAR, error
            assert graphs == [graphs[0]] * 3 and graphs[0] > 0, f"recompiled between steps: {graphs}"

    def ranks(self, split: tuple, worker: Callable, *args) -> list:
        """`worker(config, *args)` on the ranks of the split, with the config without the test case around it."""
        config = next(cls for cls in type(self).__mro__ if cls.__name__.endswith("TesterConfig"))()
        world = split[0] * split[1]
        if self.device != "cpu" and world > torch.accelerator.device_count():
            pytest.skip(f"needs {world} accelerators, found {torch.accelerator.device_count()}")
        return run_ranks(world, worker, config, *args, device=self.device)
