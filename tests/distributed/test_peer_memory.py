"""Messages by copies out of the other ranks' memory; on a CPU, a file that all ranks map stands in for it."""

import contextlib
import itertools
import math
import tempfile
import time
import unittest
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from parameterized import parameterized
from torch import Tensor
from torch._inductor.comm_analysis import NCCL_COLL, get_collective_type_from_kernel_name
from torch.utils._pytree import tree_map_only

from diffusers_rocm import ParallelConfig
from diffusers_rocm.distributed import peer_memory, peer_products
from diffusers_rocm.distributed.axis import Axis
from diffusers_rocm.distributed.collectives import all_gather_int64, start_exchange
from diffusers_rocm.distributed.graph_calls import call_of_a_graph, current_call
from diffusers_rocm.distributed.overlap import HIDE_MESSAGES
from diffusers_rocm.distributed.peer_memory import (
    can_fetch,
    exchange_by_copies,
    forget_places,
    held_bytes,
    teach_compiler,
)
from diffusers_rocm.hooks import sequence_split, step_graph
from diffusers_rocm.hooks.step_graph import WARM_UP, StepGraph
from diffusers_rocm.models import modeling_utils

from ..hooks.test_step_graph import Recorder, steps_of
from ..models.testing_utils.common import BaseModelTesterConfig, randn
from ..models.testing_utils.parallelism import FLOAT32_BAR
from ..models.transformers.test_models_transformer_flux import FluxTransformerTesterConfig
from ..testing_utils import relative_l2, require_torch_accelerators, require_torch_multi_accelerator, run_ranks


class Even(FluxTransformerTesterConfig):
    """What two ranks or four share alike."""

    def get_dummy_inputs(self, batch_size: int = 1) -> dict:
        inputs = super().get_dummy_inputs(batch_size)
        inputs["hidden_states"] = inputs["hidden_states"][:, :32]
        inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"][:, :8]
        return inputs | {"img_ids": inputs["img_ids"][:32], "txt_ids": inputs["txt_ids"][:8]}


class MappedFiles:
    """What torch's handle of symmetric memory answers, of a file of each rank of a group."""

    def __init__(self, files: Iterable[Path], size: int, group: dist.ProcessGroup):
        self.group = group
        self.mapped = [torch.from_file(str(file), True, size, dtype=torch.uint8) for file in files]

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        count = torch.Size(sizes).numel()
        return self.mapped[rank].view(dtype)[storage_offset : storage_offset + count].view(sizes)

    def barrier(self, channel: int, timeout_ms: int) -> None:
        assert timeout_ms > 0
        dist.barrier(self.group)


@contextlib.contextmanager
def mapped_memory(folder: str, late: float = 0.0) -> Iterator[None]:
    """Symmetric memory is files; copies come when they are waited for, so as late as they may, and `late` seconds."""
    files: dict[int, int] = {}
    numbers, times = itertools.count(), itertools.count()

    def empty(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        number = next(numbers)
        x = torch.from_file(str(Path(folder) / f"{dist.get_rank()}-{number}"), True, count, dtype=dtype)
        files[x.data_ptr()] = number
        return x

    def rendezvous(x: Tensor, group: str) -> MappedFiles:
        process_group = dist.distributed_c10d._resolve_process_group(group)
        own = torch.tensor([next(times), files[x.data_ptr()]])
        of_all = [torch.empty_like(own) for _ in range(process_group.size())]
        dist.all_gather(of_all, own, group=process_group)
        assert len({int(time) for time, _ in of_all}) == 1, "torch would wait for ever"
        ranks = dist.get_process_group_ranks(process_group)
        names = [Path(folder) / f"{rank}-{int(number)}" for rank, (_, number) in zip(ranks, of_all, strict=True)]
        return MappedFiles(names, x.nbytes, process_group)

    def copy_late(pairs: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> Callable[[], None]:
        return lambda: [time.sleep(late), *(into.copy_(x) for into, x in pairs)] and None

    memory = mock.Mock(empty=empty, rendezvous=rendezvous)
    copies = mock.patch.object(peer_products, "copy_beside", copy_late)
    with copies, mock.patch.multiple(peer_memory, symmetric=memory, copy_beside=copy_late, _shared=0):
        yield
        forget_places()


# Parts of the messages of a call, in their order, and how many are on their way before the first is waited for.
PARTS, AT_ONCE = (5, 2, 5, 2, 2, 7, 5, 5), (1, 1, 1, 2, 3)


def exchange_worker(folder: str) -> dict[str, Any]:
    """Whether what comes by copies is what the process group brings, where one rank is late."""
    axis, seed, found = Axis.of_all(), 0, {}

    def message(part: int) -> tuple[Tensor, Tensor]:
        """Begin one: what comes, and what should."""
        nonlocal seed
        seed += 1
        sent = [randn(axis.size, part, seed=seed * axis.size + rank) for rank in range(axis.size)]
        x, wanted = sent[axis.rank].flatten(), torch.cat([each[axis.rank] for each in sent])
        time.sleep(0.02 * (axis.rank == seed % axis.size))
        return torch.ops.diffusers_rocm.all_to_all_by_copies([x], 0, axis.size, axis.group.group_name, ""), wanted

    def right(at_once: Sequence[int] = AT_ONCE) -> bool:
        parts, answers = iter(PARTS), []
        for count in at_once:
            coming = [message(part) for _, part in zip(range(count), parts, strict=False)]
            answers += [torch.equal(torch.ops._c10d_functional.wait_tensor(x), wanted) for x, wanted in coming[::-1]]
        return all(answers)

    def by_group(captured: bool) -> tuple[bool, int]:
        with call_of_a_graph(captured), torch.profiler.profile() as profile:
            answer, copied = right(), current_call().by_copies
        count = [event.name for event in profile.events()].count("_c10d_functional::all_to_all_single")
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


SIDE = 12


@torch.no_grad()
def compiled_worker(folder: str) -> list[float]:
    """Errors of calls of compiled code: of two messages that do not need each other, and of a product as large as a
    message, for which the compiler wants memory; the first rank fetches late."""
    axis = Axis.of_all()
    teach_compiler()

    def two_messages(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        first = exchange_by_copies([2 * x[:, :1], x[:, 1:], x.sin()], 1, axis.size, axis.group)
        product = first.view(SIDE, SIDE) @ weight
        second = exchange_by_copies([x + 1, x.cos()], 1, axis.size, axis.group)
        return product @ weight, second

    def wanted(given: list[Tensor], weight: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.cat([torch.cat([2 * x[:, :1], x[:, 1:], x.sin()], 1)[axis.rank].flatten() for x in given])
        second = torch.cat([torch.cat([x + 1, x.cos()], 1)[axis.rank].flatten() for x in given])
        return first.view(SIDE, SIDE) @ weight @ weight, second

    compiled, found = torch.compile(two_messages, fullgraph=True, options=HIDE_MESSAGES), []
    with mapped_memory(folder, late=0.05 * (axis.rank == 0)):
        for step in range(WARM_UP + 3):
            shape = axis.size, SIDE // 2, SIDE // axis.size
            given = [randn(*shape, seed=step * axis.size + rank) for rank in range(axis.size)]
            weight = randn(SIDE, SIDE, seed=step)
            with call_of_a_graph(captured=step >= WARM_UP):
                answers = compiled(given[axis.rank], weight)
            found.append(max(map(relative_l2, answers, wanted(given, weight))))
    return found


BY_COPIES = "diffusers_rocm::all_to_all_by_copies"


class Replayed(Recorder):
    """What it replays goes by copies, as what was captured."""

    def __call__(self, call: Callable[[], Any], *args: Any) -> tuple[Callable[[], None], Any, None]:
        def of_the_graph() -> Any:
            with call_of_a_graph(captured=True):
                return call()

        return super().__call__(of_the_graph, *args)


@torch.no_grad()
def flux_worker(folder: str, how: str) -> tuple[float, list[list[int]], bool]:
    """FLUX before it is a graph, as one, over ranks that reach each other's memory, and after. The largest error; of a
    call of each the messages that are fetched, the functional ones of the process group, and those that are not made
    where they are fetched; and whether a warning said that it was compiled too early."""
    config = Even()
    model, (first, *steps) = config.get_model(), steps_of(config.get_inputs(1), WARM_UP + 3)
    wanted = [config.get_output(model, each) for each in (first, *steps, first)]
    teach_compiler()
    found, outputs = [], []

    def profiled(step: dict[str, Any]) -> None:
        config.get_output(model, step)  # it may be compiled
        with torch.profiler.profile() as profile:
            outputs.append(config.get_output(model, step))
        names = [event.name for event in profile.events()]
        kinds = "diffusers_rocm::fetch_all_to_all", "_c10d_functional::all_to_all_single", BY_COPIES
        found.append([names.count(kind) for kind in kinds])

    fast = mock.patch.object(modeling_utils, "links_are_slow", lambda _: False)
    reached = mock.patch.object(sequence_split, "reaches_memory", lambda _: True)
    with fast, reached, mapped_memory(folder), mock.patch.object(step_graph, "record", Replayed()):
        model.enable_parallelism(config=ParallelConfig(ulysses=dist.get_world_size()))
        if how == "compiled before":
            model.compile_repeated_blocks(fullgraph=True)
        profiled(first)
        with mock.patch.object(step_graph.logger, "warning") as warning:
            graph = StepGraph(model)
        if how == "compiled":
            model.compile_repeated_blocks(fullgraph=True)
        outputs += [config.get_output(model, each) for each in steps[:-1]]
        profiled(steps[-1])
        graph.remove()
        profiled(first)
    return max(map(relative_l2, outputs, wanted)), found, warning.called


@torch.no_grad()
def on_gpus(config: BaseModelTesterConfig, compiled: bool, **mesh: Any) -> tuple[float, list[str]]:
    """The largest error of a model as a graph, and what its replay launches, by name."""
    device = torch.device("cuda", dist.get_rank())
    model, inputs = config.get_model().to(device), config.get_inputs(1)
    steps = tree_map_only(Tensor, lambda x: x.to(device), steps_of(inputs, WARM_UP + 3))
    wanted = [config.get_output(model, each) for each in steps]
    model.enable_parallelism(config=ParallelConfig(**mesh))
    graph = StepGraph(model)
    if compiled:
        torch._dynamo.reset()
        model.compile_repeated_blocks(fullgraph=True)
    outputs = [config.get_output(model, each) for each in steps]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        config.get_output(model, steps[0])
        torch.cuda.synchronize()
    graph.remove()
    return max(map(relative_l2, outputs, wanted)), [event.name for event in profile.events()]


def count_parts(names: list[str], *parts: str) -> dict[str, int]:
    """In how many names each part is."""
    return {part: sum(part in name for name in names) for part in parts}


def gpu_worker(
    degrees: dict[str, int],
    compiled: bool,
    config_class: type[BaseModelTesterConfig] = Even,
    sizes: tuple[int, ...] | None = None,
) -> tuple[float, dict[str, int], int]:
    """The error of a model as a graph, what its replay launches, and bytes held."""
    config = config_class()
    config.sizes = sizes
    error, names = on_gpus(config, compiled, **degrees)
    return error, count_parts(names, "Memcpy PtoP", "barrier_kernel", "SendRecv", "AllReduce"), held_bytes()


# Meshes of four GPUs, and the copies of a step: eight messages, each from all others of the Ulysses axis.
FOUR = ({"ulysses": 4}, 24), ({"tp": 2, "ulysses": 2}, 8), ({"ring": 2, "ulysses": 2}, 8)


class TestPeerMemory(unittest.TestCase):
    def test_exchange(self):
        count, size = len(PARTS), 4 * 3
        with tempfile.TemporaryDirectory() as folder:
            for found in run_ranks(3, exchange_worker, folder):
                self.assertEqual(
                    found,
                    {
                        "never prepared": (True, count),
                        "counted otherwise": ((True, count), (True, 0)),
                        "no memory for the second": ((True, count), (True, count)),
                        "nor later": ((True, count), (True, count), size * (5 + 2)),  # 2 is of what was forgotten
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

    def test_what_goes_by_copies(self):
        with tempfile.TemporaryDirectory() as folder:
            for found in run_ranks(2, ways_worker, folder):
                self.assertEqual(found.pop("equal"), (True, 1))
                self.assertEqual(set(found.values()), {(True, 0)}, found)

    def test_compiled(self):
        with tempfile.TemporaryDirectory() as folder:
            for found in run_ranks(2, compiled_worker, folder):
                self.assertLessEqual(max(found), FLOAT32_BAR)

    def test_room(self):
        """A place takes a message of its size, and no larger one."""
        places = [peer_memory._Place(torch.empty(size, dtype=torch.uint8), None) for size in (64, 32)]
        with mock.patch.dict(peer_memory._places, {"group": places}):
            rooms = [peer_memory._room(size, 0, "group") for size in (64, 65)]
        assert rooms == [places[0], None], rooms

    def test_what_is_reached(self):
        with tempfile.TemporaryDirectory() as folder:
            for answers in run_ranks(2, reach_worker, folder):
                self.assertEqual(answers, [(True, 3), (False, 1), (False, 1), (False, 2)])

    def test_how_long_it_takes_is_known(self):
        """On GPUs alone the compiler asks."""
        name = str(torch.ops.diffusers_rocm.fetch_all_to_all.default)
        self.assertEqual(get_collective_type_from_kernel_name(name), NCCL_COLL.ALL_TO_ALL)

    @parameterized.expand(
        [
            ("eager", [[0, 0, 0], [8, 0, 8], [0, 0, 0]]),  # two of each block
            ("compiled", [[0, 0, 0], [8, 0, 0], [0, 8, 0]]),
            ("compiled before", [[0, 8, 0], [8, 0, 0], [0, 8, 0]]),
        ]
    )
    def test_flux(self, how, wanted):
        with tempfile.TemporaryDirectory() as folder:
            for rank, (error, messages, warned) in enumerate(run_ranks(2, flux_worker, folder, how)):
                self.assertLessEqual(error, FLOAT32_BAR)
                self.assertEqual(messages, wanted)
                self.assertEqual(warned, how == "compiled before" and rank == 0)

    @parameterized.expand([(False,), (True,)])
    @require_torch_multi_accelerator
    def test_gpus(self, compiled):
        self.check_gpus({"ulysses": 2}, 8, compiled)

    @parameterized.expand([(*mesh, compiled) for mesh in FOUR for compiled in (False, True)])
    @require_torch_accelerators(4)
    def test_four_gpus(self, degrees, copies, compiled):
        self.check_gpus(degrees, copies, compiled)

    def check_gpus(self, degrees: dict[str, int], copies: int, compiled: bool) -> None:
        for error, found, held in run_ranks(math.prod(degrees.values()), gpu_worker, degrees, compiled, device="cuda"):
            self.assertLessEqual(error, FLOAT32_BAR)
            self.assertEqual(found["Memcpy PtoP"], copies, found)
            # Tokens in slices (`tp`) meet for eight gathers and eight sums, and once before these.
            self.assertEqual(found["barrier_kernel"], 9 + 17 * ("tp" in degrees), found)
            if "ring" not in degrees:  # what a ring gathers goes as NCCL likes
                self.assertEqual(found["SendRecv"], 0, found)
            self.assertGreater(held, 0)
