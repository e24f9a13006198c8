"""Messages by copies out of the other ranks' memory."""

import contextlib
import itertools
import math
import tempfile
import time
import unittest
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from parameterized import parameterized
from torch import Tensor
from torch._inductor.comm_analysis import NCCL_COLL, get_collective_type_from_kernel_name
from torch.utils._pytree import tree_map_only

from diffusers_rocm import ParallelConfig
from diffusers_rocm.distributed import choices, links, peer_memory
from diffusers_rocm.distributed.axis import Axis
from diffusers_rocm.distributed.choices import Busy
from diffusers_rocm.distributed.collectives import all_gather_int64, start_exchange, start_gather_tokens
from diffusers_rocm.distributed.graph_calls import call_of_a_graph, current_call
from diffusers_rocm.distributed.overlap import HIDE_MESSAGES
from diffusers_rocm.distributed.peer_memory import (
    can_fetch,
    exchange_by_copies,
    forget_places,
    gather_by_copies,
    held_bytes,
    lay_for_all,
    teach_compiler,
)
from diffusers_rocm.hooks import sequence_split, step_graph
from diffusers_rocm.hooks.step_graph import WARM_UP, StepGraph
from diffusers_rocm.models import modeling_utils

from ..hooks.test_step_graph import Recorder, steps_of
from ..models.testing_utils.common import BaseModelTesterConfig, randn
from ..models.testing_utils.parallelism import FLOAT32_BAR
from ..testing_utils import relative_l2, require_torch_accelerators, require_torch_multi_accelerator, run_ranks
from .peer_memory_on_a_cpu import Even, MappedFiles, mapped_memory


# Parts of the messages of a call, in their order, and how many are on their way before the first is waited for.
PARTS, AT_ONCE = (5, 2, 5, 2, 2, 7, 5, 5), (1, 1, 1, 2, 3)


def exchange_worker(folder: str, kind: str) -> dict[str, Any]:
    """Whether what comes by copies is what the process group brings, where one rank is late."""
    axis, seed, found = Axis.of_all(), 0, {}

    def message(part: int) -> tuple[Tensor, Tensor]:
        """Begin one: what comes, and what should."""
        nonlocal seed
        seed += 1
        sent = [randn(axis.size, part, seed=seed * axis.size + rank) for rank in range(axis.size)]
        wanted = torch.cat([(each if kind == "all_gather" else each[axis.rank]).flatten() for each in sent])
        time.sleep(0.02 * (axis.rank == seed % axis.size))
        by_copies = getattr(torch.ops.diffusers_rocm, f"{kind}_by_copies")
        return by_copies([sent[axis.rank].flatten()], 0, axis.size, axis.group.group_name, ""), wanted

    def right(at_once: Sequence[int] = AT_ONCE) -> bool:
        parts, answers = iter(PARTS), []
        for count in at_once:
            coming = [message(part) for _, part in zip(range(count), parts, strict=False)]
            answers += [torch.equal(torch.ops._c10d_functional.wait_tensor(x), wanted) for x, wanted in coming[::-1]]
        return all(answers)

    def by_group(captured: bool) -> tuple[bool, int]:
        with call_of_a_graph(captured), torch.profiler.profile() as profile:
            answer, copied = right(), current_call().by_copies
        by_group = {"all_to_all": "all_to_all_single", "all_gather": "all_gather_into_tensor"}[kind]
        count = [event.name for event in profile.events()].count(f"_c10d_functional::{by_group}")
        assert copied == (count < sum(AT_ONCE))
        return answer, count

    def memory_for(count: int) -> Callable[..., Tensor]:
        """Of a rank that has it for so many places."""
        empty, left = peer_memory.symmetric.empty, [None] * count
        return lambda *args, **kwargs: (empty(*args, **kwargs), left.pop())[0]

    with mapped_memory(folder):
        found["never prepared"] = by_group(captured=True)
        pair = dist.new_group([1, 2])
        if axis.rank > 0:  # shares, with another group, more than the first rank
            peer_memory._share(8, axis.device, pair)
        found["counted otherwise"] = by_group(captured=False), by_group(captured=True)
        forget_places(axis.group)
        with mock.patch.object(peer_memory.symmetric, "empty", memory_for(1 if axis.rank == 1 else 2)):
            found["no memory for the second"] = by_group(captured=False), by_group(captured=True)
        found["nor later"] = by_group(captured=False), by_group(captured=True), held_bytes()
        forget_places()
        found["before"], found["held"] = by_group(captured=False), held_bytes()
        found["captured"], found["again"] = by_group(captured=True), by_group(captured=True)
        found["short calls"] = []
        for _ in range(6):
            with call_of_a_graph(captured=True):
                found["short calls"].append(right([1]))
        with call_of_a_graph(captured=False):
            message(11)
        found["grown"], found["held by both"] = by_group(captured=True), held_bytes()
        found["outside"] = right()
    found["let go"] = held_bytes()
    return found


def reach_worker(folder: str) -> list[tuple[bool, int]]:
    """What the ranks say of each other's memory, and how often they ask: as it is; where one cannot make it; where one
    cannot share it; where what is there is another's."""
    axis, answers, asked = Axis.of_all(), [], 0

    def on_all(own: bool) -> bool:
        nonlocal asked
        asked += 1
        return bool(all_gather_int64(torch.tensor([own]), axis).min())

    def cannot_make(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no memory\nat all")

    def cannot_share(*args: Any) -> Any:
        rendezvous(*args)
        raise RuntimeError("no memory of others")

    get_buffer = MappedFiles.get_buffer

    def another(place: Any, *args: Any) -> Tensor:
        return get_buffer(place, axis.size - 1 - args[0], *args[1:])

    with mapped_memory(folder):
        rendezvous = peer_memory.symmetric.rendezvous
        broken = (
            {"empty": cannot_make} if axis.rank == 0 else {},
            {"rendezvous": cannot_share} if axis.rank == 0 else {},
        )
        for replaced in ({}, *broken):
            asked = 0
            with contextlib.ExitStack() as stack:
                for name, fails in replaced.items():
                    stack.enter_context(mock.patch.object(peer_memory.symmetric, name, fails))
                answers.append((can_fetch(axis.group, axis.device, on_all), asked))
        asked = 0
        with mock.patch.object(MappedFiles, "get_buffer", another):
            answers.append((can_fetch(axis.group, axis.device, on_all), asked))
    return answers


@torch.no_grad()
def long_worker(folder: str) -> list[list[bool]]:
    """Whether long messages are what they should be, of ranks of which one is late, beside others of the same group:
    before there is room, in two captured calls, and in one for which they have become too long."""
    axis, numbers, answers = Axis.of_all(), itertools.count(), []
    name, lengths = axis.group.group_name, (4, 2, 3)

    def gathers() -> bool:
        x = randn(axis.size, 4, seed=next(numbers))
        return torch.equal(gather_by_copies([x[axis.rank : axis.rank + 1]], 1, axis.size, axis.group), x)

    def right(times: int) -> bool:
        given = [[randn(2, times * length, 3, seed=next(numbers)) for length in lengths] for _ in range(2)]
        wanted = [torch.cat(parts, 2).flatten() for parts in zip(*given, strict=True)]
        laid = lay_for_all([of_all[axis.rank] for of_all in given], 2, max(map(len, wanted)), name)
        if laid is None:
            return not gathers()
        message, fetch = laid
        found = [torch.equal(message.flatten(), wanted[axis.rank])]
        for step in range(1, axis.size):
            peer = (axis.rank - step) % axis.size
            time.sleep(0.02 * (axis.rank == next(numbers) % axis.size))
            arrive = fetch(peer, len(wanted[peer]))
            found.append(step == 1 or gathers())
            found.append(torch.equal(arrive(), wanted[peer]))
        return all(found)

    barrier = MappedFiles.barrier

    def barrier_left_late(memory: MappedFiles, **how: int) -> None:
        barrier(memory, **how)
        time.sleep(0.02 * (axis.rank == next(numbers) % axis.size))

    with mapped_memory(folder), mock.patch.object(MappedFiles, "barrier", barrier_left_late):
        for captured, times in ((False, 1), (True, 1), (True, 1), (True, 2)):
            with call_of_a_graph(captured):
                answers.append([right(times) for _ in range(3)])
                assert current_call().by_copies == captured
        answers.append([lay_for_all([torch.zeros(1)], 0, 1, name) is not None])
    return answers


def ways_worker(folder: str) -> dict[str, tuple[bool, int]]:
    """Whether what is exchanged is what comes by the process group, and how many messages are fetched by copies."""
    plain, found = Axis.of_all(), {}
    reached = replace(plain, peer_memory=True)
    x = randn(2, 6, seed=plain.rank)
    low, trained = x.to(torch.bfloat16), randn(2, 6, seed=plain.rank).requires_grad_()
    ways = {
        "equal": ([x, 2 * x], 1, ((12, 12), (12, 12)), {}),
        "of other sizes": ([x[0, : 3 + plain.rank], x[1]], 0, ((3, 6), (4, 6)), {}),
        "sent alike": ([x[:, : 3 + plain.rank]], 0, ((3, 3), (4, 4)), {}),
        "of other dtypes": ([low, x], 1, ((12, 12), (12, 12)), {}),
        "in 8 bits": ([x], 0, ((6, 6), (6, 6)), {"communication": "int8"}),
        "trained": ([trained, x], 1, ((12, 12), (12, 12)), {}),
    }
    with mapped_memory(folder):
        for name, (parts, dim, sent, how) in ways.items():
            send, receive = sent[plain.rank], tuple(each[plain.rank] for each in sent)
            wanted = start_exchange(parts, dim, send, receive, replace(plain, **how))()
            for captured in (False, True):
                with call_of_a_graph(captured), torch.profiler.profile() as profile:
                    answer = start_exchange(parts, dim, send, receive, replace(reached, **how))()
            fetched = [event.name for event in profile.events()].count("diffusers_rocm::fetch_all_to_all")
            equal = torch.equal(answer, wanted) and answer.requires_grad == wanted.requires_grad
            found[name] = equal and answer.dtype == wanted.dtype, fetched
    return found


def gathers_worker(folder: str) -> dict[str, tuple[bool, int]]:
    """The same of what is gathered, beside what has gradients."""
    plain, found = Axis.of_all(), {}
    reached = replace(plain, peer_memory=True)
    x = randn(3, 2, 6, seed=plain.rank)
    trained = randn(3, 2, 6, seed=plain.rank).requires_grad_()
    ways = {
        "equal": ([x, 2 * x], (3, 3), {}),
        "of other sizes": ([x[: 2 + plain.rank], x[: 2 + plain.rank]], (2, 3), {}),
        "in 8 bits": ([x, x], (3, 3), {"communication": "int8"}),
        "trained": ([trained, x], (3, 3), {}),
    }
    with mapped_memory(folder):
        for name, (parts, sizes, how) in ways.items():
            wanted = start_gather_tokens(parts, 2, sizes, replace(plain, **how))()
            for captured in (False, True):
                with call_of_a_graph(captured), torch.profiler.profile() as profile:
                    answer = start_gather_tokens(parts, 2, sizes, replace(reached, **how), trained)()
            fetched = [event.name for event in profile.events()].count("diffusers_rocm::fetch_all_gather")
            found[name] = torch.equal(answer, wanted) and answer.requires_grad == wanted.requires_grad, fetched
    return found


SIDE = 12


@torch.no_grad()
def compiled_worker(folder: str) -> list[float]:
    """Errors of calls of compiled code: of three messages that do not need each other, and of a product as large as a
    message, for which the compiler wants memory; the first rank fetches late."""
    axis = Axis.of_all()
    teach_compiler()

    def messages(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = exchange_by_copies([2 * x[:, :1], x[:, 1:], x.sin()], 1, axis.size, axis.group)
        product = first.view(SIDE, SIDE) @ weight
        second = exchange_by_copies([x + 1, x.cos()], 1, axis.size, axis.group)
        third = gather_by_copies([x - 1, x.exp()], 2, axis.size, axis.group)
        return product @ weight, second, third

    def wanted(given: list[Tensor], weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = torch.cat([torch.cat([2 * x[:, :1], x[:, 1:], x.sin()], 1)[axis.rank].flatten() for x in given])
        second = torch.cat([torch.cat([x + 1, x.cos()], 1)[axis.rank].flatten() for x in given])
        third = torch.cat([torch.cat([x - 1, x.exp()], 2) for x in given])
        return first.view(SIDE, SIDE) @ weight @ weight, second, third

    compiled, found = torch.compile(messages, fullgraph=True, options=HIDE_MESSAGES), []
    with mapped_memory(folder, late=0.05 * (axis.rank == 0)):
        for step in range(WARM_UP + 3):
            shape = axis.size, SIDE // 2, SIDE // axis.size
            given = [randn(*shape, seed=step * axis.size + rank) for rank in range(axis.size)]
            weight = randn(SIDE, SIDE, seed=step)
            with call_of_a_graph(captured=step >= WARM_UP):
                answers = compiled(given[axis.rank], weight)
            found.append(max(map(relative_l2, answers, wanted(given, weight))))
    return found


# Each mesh of two ranks, whether a ring of it hops, and of messages the kinds that are fetched as one, the functional
# ones of the process group, those that are not made where they are fetched, and a ring's hops by the group.
MESHES = {
    "ulysses": ("fetch_all_to_all", "all_to_all_single", "all_to_all_by_copies"),
    "ring": ("fetch_all_gather", "all_gather_into_tensor", "all_gather_by_copies"),
    "ring that hops": ("fetch_all_gather", "alltoall_base_", "all_gather_by_copies"),
}


class Replayed(Recorder):
    """What it replays goes by copies, as what was captured."""

    def __call__(self, call: Callable[[], Any], *args: Any) -> tuple[Callable[[], None], Any, None]:
        def of_the_graph() -> Any:
            with call_of_a_graph(captured=True):
                return call()

        return super().__call__(of_the_graph, *args)


@torch.no_grad()
def flux_worker(folder: str, mesh: str, how: str) -> tuple[float, list[list[int]], bool, list[bool]]:
    """FLUX before it is a graph, as one, over ranks that reach each other's memory, and after. The largest error; how
    many messages of each kind a call of each has; whether a warning said that it was compiled too early; and whether
    memory is held by the graph, and after it."""
    config = Even()
    model, (first, *steps) = config.get_model(), steps_of(config.get_inputs(1), WARM_UP + 3)
    wanted = [config.get_output(model, each) for each in (first, *steps, first)]
    teach_compiler()
    found, outputs = [], []

    def profiled(step: dict[str, Any]) -> None:
        config.get_output(model, step)  # it may be compiled
        with torch.profiler.profile() as profile:
            outputs.append(config.get_output(model, step))
        names = [event.name.split("::")[-1] for event in profile.events()]
        found.append([names.count(kind) for kind in MESHES[mesh]])

    fast = mock.patch.object(modeling_utils, "links_are_slow", lambda _: False)
    reached = mock.patch.object(sequence_split, "reaches_memory", lambda _: True)
    busy = mock.patch.object(choices, "OF_CPU", Busy(1 << 15, 1 << 40) if mesh == "ring" else choices.OF_CPU)
    with fast, reached, busy, mapped_memory(folder), mock.patch.object(step_graph, "record", Replayed()):
        model.enable_parallelism(config=ParallelConfig(**{mesh.split()[0]: dist.get_world_size()}))
        if how == "compiled before":
            model.compile_repeated_blocks(fullgraph=True)
        profiled(first)
        with mock.patch.object(step_graph.logger, "warning") as warning:
            graph = StepGraph(model)
        if how == "compiled":
            torch._dynamo.reset()  # of other tests, which know another `choices.OF_CPU`
            model.compile_repeated_blocks(fullgraph=True)
        outputs += [config.get_output(model, each) for each in steps[:-1]]
        profiled(steps[-1])
        held = [held_bytes() > 0]
        graph.remove()
        held.append(held_bytes() > 0)
        profiled(first)
    return max(map(relative_l2, outputs, wanted)), found, warning.called, held


@torch.no_grad()
def on_gpus(config: BaseModelTesterConfig, compiled: bool, **mesh: Any) -> tuple[float, list[str], list[bool]]:
    """The largest error of a model as a graph; what its replay launches, by name; and whether memory is held by the
    graph, and after it."""
    device = torch.device("cuda", dist.get_rank())
    model, inputs = config.get_model().to(device), config.get_inputs(1)
    steps = tree_map_only(Tensor, lambda x: x.to(device), steps_of(inputs, WARM_UP + 3))
    wanted = [config.get_output(model, each) for each in steps]
    with mock.patch.object(links, "is_known", lambda _: True):  # on any GPUs that reach each other's memory
        model.enable_parallelism(config=ParallelConfig(**mesh))
    graph = StepGraph(model)
    if compiled:
        torch._dynamo.reset()
        model.compile_repeated_blocks(fullgraph=True)
    outputs = [config.get_output(model, each) for each in steps]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        config.get_output(model, steps[0])
        torch.cuda.synchronize()
    held = [held_bytes() > 0]
    graph.remove()
    held.append(held_bytes() > 0)
    return max(map(relative_l2, outputs, wanted)), [event.name for event in profile.events()], held


def count_parts(names: list[str], *parts: str) -> dict[str, int]:
    """In how many names each part is."""
    return {part: sum(part in name for name in names) for part in parts}


def gpu_worker(
    degrees: dict[str, int],
    compiled: bool,
    config_class: type[BaseModelTesterConfig] = Even,
    sizes: tuple[int, ...] | None = None,
    hops: bool = False,
) -> tuple[float, dict[str, int], list[bool]]:
    """As `on_gpus`, with what is launched counted; a ring hops, or gathers at once."""
    config = config_class()
    config.sizes = sizes
    with mock.patch.object(choices, "OF_CPU", choices.OF_CPU if hops else Busy(1 << 15, 1 << 40)):  # here of GPUs, too
        error, names, held = on_gpus(config, compiled, **degrees)
    return error, count_parts(names, "Memcpy PtoP", "barrier_kernel", "SendRecv", "AllReduce"), held


# Meshes of two GPUs and of four, whether a ring hops, and of a step the copies, each message from all others of its
# axis, and how often ranks meet: for each message and once before, or twice for one that hops; tokens in slices (`tp`)
# have eight gathers and eight sums.
TWO = ({"ulysses": 2}, False, 8, 9), ({"ring": 2}, False, 4, 5), ({"ring": 2}, True, 4, 8)
FOUR = (
    ({"ulysses": 4}, False, 24, 9),
    ({"ring": 4}, False, 12, 5),
    ({"ring": 4}, True, 12, 8),
    ({"tp": 2, "ulysses": 2}, False, 8, 26),
    ({"ring": 2, "ulysses": 2}, False, 12, 14),
)


class TestPeerMemory(unittest.TestCase):
    @parameterized.expand([("all_to_all",), ("all_gather",)])
    def test_exchange(self, kind):
        count, size = len(PARTS), 4 * 3
        with tempfile.TemporaryDirectory() as folder:
            for found in run_ranks(3, exchange_worker, folder, kind):
                self.assertEqual(
                    found,
                    {
                        "never prepared": (True, count),
                        "counted otherwise": ((True, count), (True, 0)),
                        "no memory for the second": ((True, count), (True, count)),
                        "nor later": ((True, count), (True, count), size * 5),  # which older graphs may still use
                        "before": (True, count),
                        "held": size * (5 + 2 + 7) + 16,  # the second place had 2 at first, and then some more than 7
                        "captured": (True, 0),
                        "again": (True, 0),
                        "short calls": [True] * 6,
                        "grown": (True, 0),
                        "held by both": size * (5 + 2 + 7 + 11) + 48,
                        "outside": True,
                        "let go": 0,
                    },
                )

    def test_long_messages(self):
        with tempfile.TemporaryDirectory() as folder:
            for before, *captured, too_long, outside in run_ranks(3, long_worker, folder):
                self.assertEqual(before, [False] * 3)
                self.assertEqual(captured, [[True] * 3] * 2)
                self.assertEqual(too_long, [False] * 3)
                self.assertEqual(outside, [False])

    @parameterized.expand([(ways_worker,), (gathers_worker,)])
    def test_what_goes_by_copies(self, worker):
        with tempfile.TemporaryDirectory() as folder:
            for found in run_ranks(2, worker, folder):
                self.assertEqual(found.pop("equal"), (True, 1))
                self.assertEqual(set(found.values()), {(True, 0)}, found)

    def test_compiled(self):
        with tempfile.TemporaryDirectory() as folder:
            for found in run_ranks(2, compiled_worker, folder):
                self.assertLessEqual(max(found), FLOAT32_BAR)

    def test_room(self):
        """A place takes a message of its size, and no larger one."""
        places = {index: peer_memory._Place(torch.empty(64 >> index, dtype=torch.uint8), None) for index in range(2)}
        with mock.patch.dict(peer_memory._places, {"group": places}):
            rooms = [peer_memory._room(size, 0, "group") for size in (64, 65)]
        assert rooms == [places[0], None], rooms

    def test_what_is_reached(self):
        with tempfile.TemporaryDirectory() as folder:
            for answers in run_ranks(2, reach_worker, folder):
                self.assertEqual(answers, [(True, 3), (False, 1), (False, 1), (False, 2)])

    def test_how_long_it_takes_is_known(self):
        """On GPUs alone the compiler asks."""
        for kind in (NCCL_COLL.ALL_TO_ALL, NCCL_COLL.ALL_GATHER):
            name = str(getattr(torch.ops.diffusers_rocm, f"fetch_{kind.name.lower()}").default)
            self.assertEqual(get_collective_type_from_kernel_name(name), kind)

    @parameterized.expand(
        [
            ("ulysses", "eager", [[0, 0, 0], [8, 0, 8], [0, 0, 0]]),  # two of each block
            ("ulysses", "compiled", [[0, 0, 0], [8, 0, 0], [0, 8, 0]]),
            ("ulysses", "compiled before", [[0, 8, 0], [8, 0, 0], [0, 8, 0]]),
            ("ring", "eager", [[0, 0, 0], [4, 0, 4], [0, 0, 0]]),
            ("ring", "compiled", [[0, 0, 0], [4, 0, 0], [0, 4, 0]]),
            ("ring that hops", "eager", [[0, 4, 0], [0, 0, 0], [0, 4, 0]]),
            ("ring that hops", "compiled", [[0, 4, 0], [0, 0, 0], [0, 4, 0]]),
        ]
    )
    def test_flux(self, mesh, how, wanted):
        with tempfile.TemporaryDirectory() as folder:
            for rank, (error, messages, warned, held) in enumerate(run_ranks(2, flux_worker, folder, mesh, how)):
                self.assertLessEqual(error, FLOAT32_BAR)
                self.assertEqual(messages, wanted)
                self.assertEqual(warned, how == "compiled before" and rank == 0)
                self.assertEqual(held, [True, False])

    @parameterized.expand([(*each, compiled) for each in TWO for compiled in (False, True)])
    @require_torch_multi_accelerator
    def test_gpus(self, *case):
        self.check_gpus(*case)

    @parameterized.expand([(*each, compiled) for each in FOUR for compiled in (False, True)])
    @require_torch_accelerators(4)
    def test_four_gpus(self, *case):
        self.check_gpus(*case)

    def check_gpus(self, degrees: dict[str, int], hops: bool, copies: int, meetings: int, compiled: bool) -> None:
        how = degrees, compiled, Even, None, hops
        for error, found, held in run_ranks(math.prod(degrees.values()), gpu_worker, *how, device="cuda"):
            self.assertLessEqual(error, FLOAT32_BAR)
            self.assertEqual(found["Memcpy PtoP"], copies, found)
            self.assertEqual(found["barrier_kernel"], meetings, found)
            self.assertEqual(found["SendRecv"], 0, found)
            self.assertEqual(held, [True, False])
