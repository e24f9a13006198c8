"""A step as a graph on GPUs."""

import itertools
import unittest

import pytest
import torch
from parameterized import parameterized

from diffusers_rocm import ParallelConfig
from diffusers_rocm.hooks.step_graph import WARM_UP, StepGraph

from ..models.testing_utils.common import randn
from ..models.testing_utils.parallelism import FLOAT32_BAR
from ..models.transformers.test_models_transformer_flux import FluxTransformerTesterConfig
from ..testing_utils import (
    relative_l2,
    require_torch_accelerator,
    require_torch_accelerators,
    require_torch_multi_accelerator,
    run_ranks,
)
from .test_step_graph import MESHES, steps_of


@torch.no_grad()
def accelerator_worker(degrees: dict[str, int], compiled: bool, dtype: torch.dtype) -> tuple[list[float], list[float]]:
    """Against the same kernels launched one by one, and against one process."""
    config, device = FluxTransformerTesterConfig(), torch.device("cuda", torch.distributed.get_rank())
    model = config.get_model(dtype=dtype).to(device)
    inputs = {name: x.to(device) for name, x in config.cast(config.get_inputs(1), dtype).items()}
    steps = steps_of(inputs, WARM_UP + 3)
    of_one = [config.get_output(model, each) for each in steps]
    model.enable_parallelism(config=ParallelConfig(**degrees))
    graph = StepGraph(model)
    if compiled:
        torch._dynamo.reset()  # of what one process compiles there is a limit
        model.compile_repeated_blocks(fullgraph=True)
    before, outputs = ([config.get_output(model, each) for each in those] for those in (steps[:WARM_UP], steps))
    pairs = (outputs[:WARM_UP], before), (outputs, of_one)
    errors = tuple([relative_l2(x, y) for x, y in zip(*pair, strict=True)] for pair in pairs)
    assert sum(kind.replay is not None for kind in graph._kinds) == 1
    torch.cuda.synchronize()
    graph.remove()
    return errors


@require_torch_accelerator
class TestStepGraphOfOne(unittest.TestCase):
    @torch.no_grad()
    def test_weights_that_go_and_modules_that_change(self):
        """What was launched with modules that are no more is nobody's answer; memory that is no more is not read."""
        device = torch.device("cuda")
        model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8))).to(device)
        StepGraph(model)

        def check() -> None:
            for step in range(WARM_UP + 3):
                x = randn(4, 2048, seed=step).to(device)
                found, wanted = model(x), x
                for layer in model:
                    wanted = layer(wanted)
                assert torch.equal(found, wanted)

        check()
        model[3] = torch.nn.Linear(2048, 2048, device=device)
        torch.cuda.empty_cache()
        check()
        model.to("cpu")
        torch.cuda.empty_cache()
        model.to(device)
        check()
        model[5].weight.data = model[5].weight + 1
        torch.cuda.empty_cache()
        check()


@require_torch_multi_accelerator
class TestStepGraphAccelerator(unittest.TestCase):
    @parameterized.expand(itertools.product(MESHES, (False, True)))
    def test_parity(self, degrees, compiled):
        for errors in run_ranks(2, accelerator_worker, degrees, compiled, torch.float32, device="cuda"):
            assert max(map(max, errors)) <= FLOAT32_BAR, errors

    @parameterized.expand(itertools.product(({"tp": 2, "ulysses": 2}, {"ring": 2, "ulysses": 2}), (False, True)))
    @require_torch_accelerators(4)
    def test_parity_of_products(self, degrees, compiled):
        for errors in run_ranks(4, accelerator_worker, degrees, compiled, torch.float32, device="cuda"):
            assert max(map(max, errors)) <= FLOAT32_BAR, errors

    @parameterized.expand(itertools.product(({"ulysses": 2}, {"tp": 2}), ("exact", "int8"), (False, True)))
    def test_parity_in_few_bits(self, degrees, communication, compiled):
        """What is replayed are the kernels of the model without a graph, which round alike."""
        degrees = degrees | {"communication": communication}
        for errors, _ in run_ranks(2, accelerator_worker, degrees, compiled, torch.bfloat16, device="cuda"):
            assert max(errors) <= FLOAT32_BAR, errors

    def test_what_a_capture_forbids(self):
        for message in run_ranks(2, forbidden_worker, device="cuda"):
            assert "cannot be captured, leave graphs out" in message, message


@torch.no_grad()
def forbidden_worker() -> str:
    config, device = FluxTransformerTesterConfig(), torch.device("cuda", torch.distributed.get_rank())
    model = config.get_model().to(device)
    inputs = {name: x.to(device) for name, x in config.get_inputs(1).items()}
    model.enable_parallelism(config=ParallelConfig(tp=2))
    model.proj_out.register_forward_hook(lambda module, args, output: output.sum().item() and None)
    StepGraph(model)
    with pytest.raises(ValueError) as caught:
        for _ in range(WARM_UP + 1):
            config.get_output(model, inputs)
    return str(caught.value)
