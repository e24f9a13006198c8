"""What is sent while a rank computes: sums of a product in parts, where links are slow."""

import unittest
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parameterized import parameterized

from diffusers_rocm import TensorParallelConfig
from diffusers_rocm.distributed import beside
from diffusers_rocm.distributed.axis import Axis
from diffusers_rocm.distributed.beside import linear_and_sum, parts_of_sum
from diffusers_rocm.distributed.links import links_are_slow
from diffusers_rocm.distributed.mesh import mesh_axes

from ..models.testing_utils.common import randn
from ..models.testing_utils.workers import FLOAT32_BAR, compile_worker
from ..models.transformers.test_models_transformer_flux import FluxTransformerTesterConfig
from ..models.transformers.test_models_transformer_wan import WanTransformerTesterConfig
from ..testing_utils import relative_l2, run_ranks


MODELS = {"flux": FluxTransformerTesterConfig, "wan": WanTransformerTesterConfig}
SLOW = replace(Axis.single("tp"), slow_links=True)


@torch.no_grad()
def product_worker(shape: tuple[int, ...], parts: int) -> tuple[float, list[str]]:
    """The error of a sum in parts, and what happened in which order."""
    axis = mesh_axes({"tp": dist.get_world_size()}).tp
    x, weight = randn(*shape, seed=axis.rank), randn(5, shape[-1], seed=10 + axis.rank)
    bias = randn(5, seed=20) if axis.rank == 0 else None
    wanted = F.linear(x, weight, bias)
    dist.all_reduce(wanted)
    events = []

    def noted(event, original):
        def call(*args, **kwargs):
            events.append(event)
            return original(*args, **kwargs)

        return call

    def begin(collective, received, original=beside.beside):
        events.append("begins")
        return noted("is there", original(collective, received))

    with mock.patch.object(beside, "beside", begin), mock.patch.object(F, "linear", noted("product", F.linear)):
        found = linear_and_sum(x, weight, bias, parts, axis)
    return relative_l2(found, wanted), events


@torch.no_grad()
@mock.patch.object(beside, "SUM_PART_ROWS", 2)
def model_worker(name: str) -> tuple[float, int]:
    """The error of a model whose sums are all in parts, and how many there were."""
    config, calls = MODELS[name](), []
    model, inputs = config.get_model(), config.get_inputs(2)
    reference = config.get_output(model, inputs)
    model.enable_parallelism(config=TensorParallelConfig(tp=dist.get_world_size()))

    def counted(*args, original=beside.beside):
        calls.append(args)
        return original(*args)

    with mock.patch.object(beside, "beside", counted):
        output = config.get_output(model, inputs)
    return relative_l2(output, reference), len(calls)


@mock.patch.object(beside, "SUM_PART_ROWS", 2)
def compiled_worker() -> tuple[float, list[int]]:
    return compile_worker(FluxTransformerTesterConfig(), TensorParallelConfig(tp=2), False, "inductor")


def links_worker() -> list[bool]:
    model = FluxTransformerTesterConfig().get_model()
    model.enable_parallelism(config=TensorParallelConfig(tp=2))
    return [links_are_slow(model.parallelism.axes.tp), *(axis.slow_links for axis in axes_of(model))]


def axes_of(model: torch.nn.Module) -> list[Axis]:
    held = [module.sharding.axis for module in model.modules() if hasattr(module, "sharding")]
    return [model.parallelism.axes.tp, *held]


class TestSumsInParts(unittest.TestCase):
    @parameterized.expand([(2, (7, 6), 2), (3, (2, 5, 6), 4), (2, (1, 4, 6), 4)])
    def test_product_and_sum(self, world, shape, parts):
        for error, events in run_ranks(world, product_worker, shape, parts):
            assert error <= 1e-6, error
            # Rows do not always go round.
            count = len(torch.zeros(shape).flatten(0, -2).chunk(parts))
            assert events == ["product", "begins"] * count + ["is there"] * count, events

    @parameterized.expand([("flux", 2), ("wan", 3)])
    def test_models(self, name, world):
        for error, calls in run_ranks(world, model_worker, name):
            assert error <= FLOAT32_BAR and calls > 0, (error, calls)

    def test_compiled(self):
        for error, graphs in run_ranks(2, compiled_worker):
            assert error <= FLOAT32_BAR and graphs == [graphs[0]] * 3, (error, graphs)

    def test_links_of_the_host_are_slow(self):
        assert not links_are_slow(Axis.single("tp"))
        for slow in run_ranks(2, links_worker):
            assert all(slow) and len(slow) > 10

    def test_where_nothing_is_gained_there_is_one_part(self):
        x, weight = torch.zeros(1, 4096, 8), torch.nn.Parameter(torch.zeros(8, 8))
        with torch.no_grad():
            assert parts_of_sum(x, weight, SLOW) == 4
            assert parts_of_sum(x[:, :2100], weight, SLOW) == 2
            assert parts_of_sum(x[:, :2000], weight, SLOW) == parts_of_sum(x[:, :7], weight, SLOW) == 1
            assert parts_of_sum(x, weight, replace(SLOW, slow_links=False)) == 1
            assert parts_of_sum(x, weight, replace(SLOW, communication="int8")) == 1
            assert parts_of_sum(x, weight.data.as_subclass(type("Quantised", (torch.Tensor,), {})), SLOW) == 1
            with torch.autocast("cpu", torch.bfloat16):
                assert parts_of_sum(x, weight, SLOW) == 1
        assert parts_of_sum(x, weight, SLOW) == 1  # gradients


if __name__ == "__main__":
    unittest.main()
