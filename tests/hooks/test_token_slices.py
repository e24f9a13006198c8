"""Tokens in slices between the products of tensor parallelism; files stand in for memory that all ranks reach."""

import contextlib
import copy
import functools
import itertools
import math
import tempfile
import time
import unittest
from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from diffusers import FirstBlockCacheConfig
from parameterized import parameterized
from peft import LoraConfig
from torch import nn

from diffusers_rocm import ParallelConfig
from diffusers_rocm.distributed import peer_products
from diffusers_rocm.distributed.axis import Axis
from diffusers_rocm.distributed.graph_calls import call_of_a_graph
from diffusers_rocm.distributed.parts import sum_parts
from diffusers_rocm.distributed.peer_memory import teach_compiler
from diffusers_rocm.hooks import sequence_split, step_graph, token_slices
from diffusers_rocm.hooks.step_graph import WARM_UP, StepGraph
from diffusers_rocm.models import modeling_utils

from ..distributed import test_peer_memory
from ..distributed.peer_memory_on_a_cpu import Even, mapped_memory
from ..distributed.test_peer_memory import Replayed
from ..models.testing_utils.common import BaseModelTesterConfig, randn
from ..models.testing_utils.parallelism import FLOAT32_BAR
from ..models.transformers.test_models_transformer_bria import BriaTransformerTesterConfig
from ..models.transformers.test_models_transformer_chronoedit import ChronoEditTransformerTesterConfig
from ..models.transformers.test_models_transformer_flux import FluxTransformerTesterConfig
from ..models.transformers.test_models_transformer_flux2 import Flux2TransformerTesterConfig
from ..models.transformers.test_models_transformer_longcat_image import LongCatImageTransformerTesterConfig
from ..models.transformers.test_models_transformer_ltx import LTXVideoTransformerTesterConfig
from ..models.transformers.test_models_transformer_ovis_image import OvisImageTransformerTesterConfig
from ..models.transformers.test_models_transformer_skyreels_v2 import SkyReelsV2TransformerTesterConfig
from ..models.transformers.test_models_transformer_wan import (
    WanImageToVideoTransformerTesterConfig,
    WanTI2VTransformerTesterConfig,
    WanTransformerTesterConfig,
)
from ..testing_utils import relative_l2, require_torch_accelerators, run_ranks, slow_unless
from .test_step_graph import steps_of


OURS = "gather_slices", "multiply", "multiply_and_scatter"


@contextlib.contextmanager
def reached(folder: str, short: int) -> Iterator[None]:
    """As if ranks reached each other's memory over fast links, and steps were graphs."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(token_slices, "reaches_memory", bool))
        stack.enter_context(mock.patch.object(modeling_utils, "links_are_slow", lambda _: False))
        stack.enter_context(mock.patch.object(sequence_split, "reaches_memory", lambda axis: axis.size > 1))
        stack.enter_context(mock.patch.object(step_graph, "record", Replayed()))
        stack.enter_context(mock.patch.object(peer_products, "SHORT", short))
        stack.enter_context(mapped_memory(folder))
        yield


def counted(work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, dict[str, int]]:
    """What it answers, and how often it does each of our operations."""
    with torch.profiler.profile() as profile:
        answer = work()
    names = [event.name for event in profile.events()]
    return answer, {name: names.count(f"diffusers_rocm::{name}") for name in OURS}


LEFT = "slices", "together", "made", "later"


@torch.no_grad()
def model_worker(
    folder: str,
    config_class: type[BaseModelTesterConfig],
    sizes: tuple[int, ...] | None,
    degrees: dict[str, int],
    how: tuple[str, ...],
    short: int,
    batch: int,
) -> tuple[float, dict[str, int], bool]:
    """The largest error of a model as a graph, how many of our operations a replay does, and whether anything of ours
    is left on modules when it is no graph any more."""
    config = config_class()
    config.sizes = sizes
    model, steps = config.get_model(), steps_of(config.get_inputs(batch), WARM_UP + 2)
    wanted = [config.get_output(model, each) for each in steps]
    teach_compiler()
    with reached(folder, short):
        model.enable_parallelism(config=ParallelConfig(**degrees))
        if "fused" in how:
            model.fuse_qkv_projections()
        if how:
            torch._dynamo.reset()
        if "compiled before" in how:
            model.compile_repeated_blocks(fullgraph=True)
            config.get_output(model, steps[0])
        graph = StepGraph(model)
        if "compiled" in how:
            model.compile_repeated_blocks(fullgraph=True)
        outputs = [config.get_output(model, each) for each in steps]
        output, found = counted(lambda: config.get_output(model, steps[0]))
        graph.remove()
        outputs += [output, config.get_output(model, steps[0])]
    left = any(name in vars(module) for module in model.modules() for name in LEFT)
    return max(map(relative_l2, outputs, [*wanted, wanted[0], wanted[0]])), found, left


def _watch_on_one(model: nn.Module) -> None:
    if dist.get_rank() == 0:
        model.transformer_blocks[0].register_forward_hook(lambda *_: None)


def _with_adapter(model: nn.Module) -> None:
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "proj_out"], init_lora_weights=False))


@torch.no_grad()
def whole_worker(folder: str) -> dict[str, tuple[float, int]]:
    """The error of calls like those of graphs that have their tokens whole, and how many of our operations they do."""
    found = {}

    def both(
        name: str,
        config: FluxTransformerTesterConfig,
        prepare: Callable[[nn.Module], object],
        given: dict[str, Any] = MappingProxyType({}),
        **mesh: Any,
    ) -> None:
        model, inputs = config.get_model(), config.get_inputs(1) | given
        prepare(model)
        call = functools.partial(config.get_output, model, inputs)
        autocast = torch.autocast("cpu", torch.bfloat16) if name == "autocast" else contextlib.nullcontext()
        with autocast, model.cache_context("any"):
            wanted = call()
            model.enable_parallelism(config=ParallelConfig(tp=2, **mesh))
            StepGraph(model)
            output, counts = counted(call)
        found[name] = relative_l2(output, wanted), sum(counts.values())

    with reached(folder, 1):
        both("even", Even(), lambda model: None)
        both("odd", FluxTransformerTesterConfig(), lambda model: None)
        both("hooks of one rank", Even(), _watch_on_one)
        both("adapter", Even(), _with_adapter)
        both("autocast", Even(), lambda model: None)
        both("arguments of attention", Even(), lambda model: None, {"joint_attention_kwargs": {"scale": 0.5}})
        residuals = [randn(1, 32, 128, seed=each) for each in range(2)]
        both("controlnet", Even(), lambda model: None, {"controlnet_block_samples": residuals})
        both("cache", Even(), lambda model: model.enable_cache(FirstBlockCacheConfig(threshold=1e-9)))
        both("cast", Even(), lambda model: model.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32))
        both("8 bits", Even(), lambda model: None, communication="int8")
        with torch.enable_grad():
            both("trained", Even(), lambda model: None)
        with mock.patch.object(modeling_utils, "links_are_slow", lambda _: True):
            both("slow links", Even(), lambda model: None)
    return found


@torch.no_grad()
def bf16_worker(folder: str) -> tuple[float, float]:
    """How far from float32 one process is in bf16, and two ranks."""
    config = Even()
    model, inputs = config.get_model(), config.get_inputs(1)
    wanted = config.get_output(model, inputs)
    model.to(torch.bfloat16)
    inputs = {name: x if name.endswith("ids") else x.bfloat16() for name, x in inputs.items()}
    alone = config.get_output(model, inputs)
    with reached(folder, 1):
        model.enable_parallelism(config=ParallelConfig(tp=2))
        StepGraph(model)
        outputs = [config.get_output(model, inputs) for _ in range(WARM_UP + 2)]
    return relative_l2(alone, wanted), max(relative_l2(output, wanted) for output in outputs)


def _fuse(model: nn.Module) -> nn.Module:
    model.fuse_qkv_projections()
    return model


def _copy(model: nn.Module) -> nn.Module:
    """With weights of its own."""
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.mul_(1.25)
    return copied


def _watch(model: nn.Module) -> nn.Module:
    model.transformer_blocks[0].attn.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "hidden_states": 2 * kwargs["hidden_states"]}), with_kwargs=True
    )
    model.transformer_blocks[1].attn.to_out[0].register_forward_hook(lambda module, args, output: output.relu())
    return model


def _fuse_adapter(model: nn.Module) -> nn.Module:
    model.fuse_lora()
    model.unload_lora()
    return model


@torch.no_grad()
def changed_worker(folder: str) -> dict[str, float]:
    """The errors of graphs of models that changed when they were such already."""
    found, config = {}, Even()
    steps = steps_of(config.get_inputs(1), WARM_UP + 2)

    def change(name: str, how: Callable[[nn.Module], nn.Module], before: Callable[[nn.Module], object] = id) -> None:
        model = config.get_model()
        before(model)
        plain = how(copy.deepcopy(model))
        wanted = [config.get_output(plain, each) for each in steps]
        model.enable_parallelism(config=ParallelConfig(tp=2))
        StepGraph(model)
        changed = how(model)
        outputs = [config.get_output(changed, each) for each in steps]
        found[name] = max(map(relative_l2, outputs, wanted))

    with reached(folder, 1):
        change("fused", _fuse)
        change("copied", _copy)
        change("watched", _watch)
        change("adapter fused", _fuse_adapter, _with_adapter)
    return found


# Messages in their order: a gather of so many tensors, what is multiplied of them and when, sums of so many.
ORDERS = (
    ("gather 2", "multiply 0", "multiply 1", "sum 2"),
    ("gather 1", "gather 1", "multiply 1", "multiply 0", "sum 1", "sum 1"),
    ("gather 1", "sum 1", "multiply 0", "gather 1", "sum 2", "multiply 1"),
    ("sum 1", "sum 1", "sum 1", "gather 2", "multiply 1", "gather 1", "multiply 2", "multiply 0"),
)


def products_in_order(axis: Axis, lengths: tuple[int, ...] = (2, 3), bar: float = 1e-6) -> list[bool]:
    """Whether sums and products of slices of these lengths are right in each order of messages, twice, where one rank
    or another is late."""
    linears, found = [nn.Linear(6, 4, bias=bias) for bias in (True, False)], []
    for index, linear in enumerate(linears):
        linear.weight.data = randn(4, 6, seed=index)
    linears[0].bias.data = randn(4, seed=2)

    def play(order: Sequence[str], seed: int) -> bool:
        gathered, answers, rows = [], [], itertools.cycle(lengths)
        for turn, (what, count) in enumerate((name, int(number)) for name, number in map(str.split, order)):
            time.sleep(0.02 * (axis.rank == (seed + turn) % axis.size))
            shapes = [next(rows) for _ in range(count)] if what != "multiply" else []
            if what == "gather":
                of_all = [[randn(1, n, 6, seed=seed + 10 * turn + r) for r in range(axis.size)] for n in shapes]
                given = [each[axis.rank].clone() for each in of_all]
                every = peer_products.gather_slices(given, axis)
                for x in given:  # is what the compiler likes
                    x.zero_()
                gathered += zip(every, [torch.cat(each, 1) for each in of_all], strict=True)
            elif what == "multiply":
                every, wanted = gathered[count]
                answers += zip(peer_products.multiply(every, linears), [each(wanted) for each in linears], strict=True)
            else:
                of_all = [
                    [randn(1, axis.size * n, 6, seed=seed + 10 * turn + r) for r in range(axis.size)] for n in shapes
                ]
                sums = peer_products.multiply_and_scatter([x[axis.rank] for x in of_all], linears[:count], axis)
                for each, linear, answer in zip(of_all, linears, sums, strict=False):
                    answers.append((answer, sum(map(linear, each)).chunk(axis.size, 1)[axis.rank]))
        return all(relative_l2(answer, wanted) < bar for answer, wanted in answers)

    with torch.no_grad():
        for seed, order in enumerate(ORDERS):
            for captured in (False, True, True):
                with call_of_a_graph(captured):
                    found.append(play(order, 1000 * seed))
    return found


def products_worker(folder: str, short: int) -> list[bool]:
    with mock.patch.object(peer_products, "SHORT", short), mapped_memory(folder):
        return products_in_order(Axis.of_all())


def gpu_worker(short: int, *args: Any) -> tuple[float, dict[str, int], list[bool]]:
    """As in `test_peer_memory`; slices of fewer rows than `short` go at once, others in parts."""
    with mock.patch.object(peer_products, "SHORT", short):
        return test_peer_memory.gpu_worker(*args)


class TestTokenSlices(unittest.TestCase):
    @parameterized.expand(
        [
            ("two", {"tp": 2}, (), 1, 1),
            ("two, short", {"tp": 2}, (), 10, 2),
            ("two, of two items", {"tp": 2}, (), 1, 2),
            ("two, compiled", {"tp": 2}, ("compiled",), 5, 1),
            ("two, compiled, of two items", {"tp": 2}, ("compiled",), 1, 2),
            ("two, fused, compiled", {"tp": 2}, ("fused", "compiled"), 1, 1),
            ("four", {"tp": 4}, (), 1, 1),
            ("two by two", {"tp": 2, "ulysses": 2}, (), 1, 1),
            ("two by two, compiled", {"tp": 2, "ulysses": 2}, ("compiled",), 1, 1),
            ("two by a ring of two", {"tp": 2, "ring": 2}, (), 1, 1),
        ]
    )
    def test_flux(self, name, degrees, how, short, batch):
        slow_unless(not how or name == "two, compiled")
        # Of two blocks of two streams, and two of one. Where attention sends messages, and where projections of it are
        # one product, the MLP is by itself.
        alone = "fused" in how or len(degrees) > 1
        wanted = {"gather_slices": 2 * 3 + 2, "multiply": 2 * 4 + 2 + 2 * alone, "multiply_and_scatter": 2 * 3 + 2}
        with tempfile.TemporaryDirectory() as folder:
            for error, found, left in run_ranks(
                math.prod(degrees.values()), model_worker, folder, Even, None, degrees, how, short, batch
            ):
                self.assertLessEqual(error, FLOAT32_BAR)
                self.assertEqual(found, wanted)
                self.assertFalse(left)

    @parameterized.expand(
        [
            ("bria", BriaTransformerTesterConfig, {"tp": 4}, (), 1),
            ("longcat image", LongCatImageTransformerTesterConfig, {"tp": 2, "ring": 2}, (), 2),
            ("ovis image", OvisImageTransformerTesterConfig, {"tp": 2}, (), 1),
            ("flux.2", Flux2TransformerTesterConfig, {"tp": 2}, (), 2),
            ("flux.2, two by two, compiled", Flux2TransformerTesterConfig, {"tp": 2, "ulysses": 2}, ("compiled",), 1),
        ]
    )
    def test_models_of_two_streams(self, name, config_class, degrees, how, batch):
        slow_unless(not how)
        # As of FLUX.1; the MLP of FLUX.2's blocks of one stream is part of attention's product.
        alone = len(degrees) > 1 and config_class is not Flux2TransformerTesterConfig
        wanted = {"gather_slices": 2 * 3 + 2, "multiply": 2 * 4 + 2 + 2 * alone, "multiply_and_scatter": 2 * 3 + 2}
        self.check(config_class, (4, 8, 8), degrees, how, batch, wanted)

    @parameterized.expand(
        [
            ("wan", WanTransformerTesterConfig, {"tp": 4}, (), 1, 2),
            ("wan, of two items", WanTransformerTesterConfig, {"tp": 2}, (), 2, 2),
            ("wan, two by two", WanTransformerTesterConfig, {"tp": 2, "ulysses": 2}, (), 1, 2),
            ("wan, compiled before it is a graph", WanTransformerTesterConfig, {"tp": 2}, ("compiled before",), 1, 2),
            ("wan, image to video, compiled", WanImageToVideoTransformerTesterConfig, {"tp": 2}, ("compiled",), 1, 4),
            ("chronoedit", ChronoEditTransformerTesterConfig, {"tp": 2}, (), 1, 4),
            ("skyreels, two by two", SkyReelsV2TransformerTesterConfig, {"tp": 2, "ulysses": 2}, (), 2, 4),
            ("ltx", LTXVideoTransformerTesterConfig, {"tp": 4}, (), 2, 2),
            ("ltx, by a ring of two", LTXVideoTransformerTesterConfig, {"tp": 2, "ring": 2}, (), 1, 2),
        ]
    )
    def test_models_with_cross_attention(self, name, config_class, degrees, how, batch, conditions):
        slow_unless(how != ("compiled",))
        # In each of two blocks self-attention, cross-attention and an MLP; and products of conditions.
        wanted = {"gather_slices": 2 * 3, "multiply": 2 * (3 + conditions), "multiply_and_scatter": 2 * 3}
        self.check(config_class, (2, 6, 8), degrees, how, batch, wanted)

    def test_timesteps_of_tokens(self):
        nothing = dict.fromkeys(OURS, 0)
        self.check(WanTI2VTransformerTesterConfig, (2, 6, 8), {"tp": 2}, (), 1, nothing)

    def check(
        self,
        config_class: type[BaseModelTesterConfig],
        sizes: tuple[int, ...],
        degrees: dict[str, int],
        how: tuple[str, ...],
        batch: int,
        wanted: dict[str, int],
    ) -> None:
        world = math.prod(degrees.values())
        with tempfile.TemporaryDirectory() as folder:
            for error, found, left in run_ranks(
                world, model_worker, folder, config_class, sizes, degrees, how, 1, batch
            ):
                self.assertLessEqual(error, FLOAT32_BAR)
                self.assertEqual(found, wanted)
                self.assertFalse(left)

    def test_whole(self):
        with tempfile.TemporaryDirectory() as folder:
            for found in run_ranks(2, whole_worker, folder):
                for name in ("even", "controlnet"):
                    error, count = found.pop(name)
                    self.assertLessEqual(error, FLOAT32_BAR)
                    self.assertGreater(count, 0)
                self.assertLessEqual(found.pop("8 bits")[0], 0.05)
                self.assertLessEqual(found.pop("autocast")[0], 0.02)
                for name, (error, count) in found.items():
                    self.assertLessEqual(error, FLOAT32_BAR, name)
                    self.assertEqual(count, 0, name)

    def test_changed_models(self):
        with tempfile.TemporaryDirectory() as folder:
            for found in run_ranks(2, changed_worker, folder):
                self.assertLessEqual(max(found.values()), FLOAT32_BAR, found)

    def test_bf16(self):
        with tempfile.TemporaryDirectory() as folder:
            for alone, error in run_ranks(2, bf16_worker, folder):
                self.assertLessEqual(error, 1.25 * alone)

    @parameterized.expand([("in parts", 1), ("at once", 10), ("the shorter at once", 3)])
    def test_orders_of_messages(self, name, short):
        with tempfile.TemporaryDirectory() as folder:
            for found in run_ranks(3, products_worker, folder, short):
                self.assertEqual(found, [True] * 3 * len(ORDERS))

    def test_sum_of_parts(self):
        parts = randn(3, 5, 7, seed=0)
        self.assertTrue(torch.allclose(sum_parts(parts), parts.sum(0)))


@require_torch_accelerators(4)
class TestTokenSlicesOnFour(unittest.TestCase):
    @parameterized.expand([("compiled", True), ("eager", False)])
    def test_graph(self, name, compiled):
        for degrees in ({"tp": 4}, {"tp": 2, "ulysses": 2}):
            for error, found, held in run_ranks(4, gpu_worker, 4, degrees, compiled, device="cuda"):
                self.assertLessEqual(error, FLOAT32_BAR)
                # Six gathers and six sums of the image, in parts; two gathers and two sums of the text by itself; of
                # `ulysses` eight messages; and a meeting of each group at first.
                copies, meetings = (12 * 3, 17) if degrees == {"tp": 4} else (12 + 8, 17 + 9)
                self.assertEqual(found["Memcpy PtoP"], copies, found)
                self.assertEqual(found["barrier_kernel"], meetings, found)
                self.assertEqual(found["AllReduce"], 0)
                self.assertEqual(held, [True, False])

    @parameterized.expand(
        [
            # As of FLUX.1: in parts are six gathers and six sums; and in two ranks of text, all gathers and sums. Of
            # five heads one rank has two, which share Ulysses' messages alike, by eight copies.
            ("bria", BriaTransformerTesterConfig, (4, 8, 8), {"tp": 4}, [(36, 17)]),
            ("flux.2", Flux2TransformerTesterConfig, (4, 8, 8), {"tp": 2, "ulysses": 2}, [(12, 17), (20, 26)]),
            # In each of two blocks three gathers and three sums.
            ("wan", WanTransformerTesterConfig, (2, 6, 8), {"tp": 4}, [(36, 13)]),
            ("ltx", LTXVideoTransformerTesterConfig, (2, 6, 8), {"tp": 4}, [(36, 13)]),
        ]
    )
    def test_other_classes(self, name, config_class, sizes, degrees, wanted):
        arguments = 4, degrees, True, config_class, sizes
        for rank, (error, found, held) in enumerate(run_ranks(4, gpu_worker, *arguments, device="cuda")):
            copies, meetings = wanted[rank % len(wanted)]
            self.assertLessEqual(error, FLOAT32_BAR)
            self.assertEqual(found["Memcpy PtoP"], copies, found)
            self.assertEqual(found["barrier_kernel"], meetings, found)
            self.assertEqual(held, [True, False])
