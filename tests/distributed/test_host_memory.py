"""Messages by copies through the host's memory."""

import contextlib
import itertools
import math
import os
import random
import tempfile
import time
import unittest
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from parameterized import parameterized
from torch import Tensor

from diffusers_rocm import ParallelConfig
from diffusers_rocm.distributed import collectives, host_memory, links, peer_products
from diffusers_rocm.distributed.axis import Axis
from diffusers_rocm.distributed.beside import begin_compiled_gather, begin_exchange, send_to_all
from diffusers_rocm.distributed.graph_calls import call_of_a_graph, come_to, current_call
from diffusers_rocm.distributed.host_memory import HostMemory
from diffusers_rocm.distributed.overlap import HIDE_MESSAGES
from diffusers_rocm.hooks import step_graph
from diffusers_rocm.hooks.step_graph import WARM_UP, StepGraph
from diffusers_rocm.models import modeling_utils

from ..hooks.test_step_graph import steps_of
from ..hooks.test_token_slices import ORDERS, products_in_order
from ..models.testing_utils.common import randn
from ..models.testing_utils.parallelism import FLOAT32_BAR
from ..testing_utils import relative_l2, require_torch_accelerators, require_torch_multi_accelerator, run_ranks
from . import host_memory_on_a_cpu
from .host_memory_on_a_cpu import Held, on_a_cpu, share_on
from .peer_memory_on_a_cpu import Even
from .test_peer_memory import Replayed, count_parts, on_gpus


# Bytes that each of three ranks sends to each: none, less than a slot, some slots, and more than all slots hold.
COUNTS = ((8, 0, 64), (200, 8, 0), (72, 640, 1))


def exchange_worker() -> list[bool]:
    """Whether messages are as the process group brings them: alone, and more of them on their way at once."""
    axis, found, waiting, sent = Axis.of_all(), [], [], []
    with on_a_cpu():
        assert share_on(axis) and share_on(axis)
        memory, outside = host_memory._memories[axis.group.group_name], host_memory.of_captured_call("0")
        assert outside is None
        memory._outgoing.late = 2e-3 * (axis.rank == 0)
        for turn in range(7):
            counts = [row[turn % 3 :] + row[: turn % 3] for row in COUNTS]
            send, receive = counts[axis.rank], [row[axis.rank] for row in counts]
            x = randn(sum(send), seed=10 * turn + axis.rank)
            wanted, stacked = x.new_empty(sum(receive)), x.new_empty(3, 5, 7)
            dist.all_to_all_single(wanted, x, receive, list(send), group=axis.group)
            y = randn(5, 7, seed=turn + 100 * axis.rank)
            dist.all_gather(list(stacked.unbind()), y, group=axis.group)
            waiting.append((come_to(*memory.exchange(x, receive, send)), wanted))
            waiting.append((come_to(*memory.gather(y)), stacked.flatten(0, 1)))
            with call_of_a_graph(captured=True):
                before = current_call().by_copies
                others = send_to_all(y.flatten(), [y.numel()] * 3, axis.rank, axis.group.group_name)
                found.append(not before and current_call().by_copies)
            waiting.append((others, torch.cat([*stacked[: axis.rank], *stacked[axis.rank + 1 :]]).flatten()))
            sent += [x, y]
            if turn % 2 or turn == 6:
                time.sleep(0.01 * axis.rank)
                found += [torch.equal(arrive(), expected) for arrive, expected in waiting]
                for each in sent:  # is the sender's again
                    each.zero_()
                waiting, sent = [], []
        dist.barrier()
        words = itertools.product(range(3), range(host_memory.SLOTS))
        found.append(not any(memory._word(axis.rank, *each) for each in words))
    return found


def any_messages_worker(seed: int) -> list[bool]:
    """Whether messages of any sizes, for all or for each, some of them on their way at once, are what was sent."""
    axis, draw, waiting, found = Axis.of_all(), random.Random(seed), [], []
    ranks, sizes = range(axis.size), (0, 1, 31, 32, 33, 64, 200, 500)

    def bytes_of(source: int, target: int, count: int) -> Tensor:
        return torch.full((count,), (7 * message + 3 * source + target) % 256, dtype=torch.uint8)

    with on_a_cpu():
        assert share_on(axis)
        memory = host_memory.of_group(axis.group.group_name)
        for queue in (memory._outgoing, memory._incoming):
            queue.late = 1e-4 * (axis.rank % 2)
        for message in range(60):
            for_all = draw.random() < 0.4
            counts = [[draw.choice(sizes)] * axis.size if for_all else draw.choices(sizes, k=axis.size) for _ in ranks]
            to = 0 if for_all else axis.rank
            wanted = [bytes_of(source, to, counts[source][axis.rank]) for source in ranks]
            sent = [bytes_of(axis.rank, target, counts[axis.rank][target]) for target in ranks]
            into = [torch.zeros_like(x) for x in wanted]
            waiting.append((memory.begin(wanted[axis.rank] if for_all else sent, into), into, wanted))
            if draw.random() < 0.3 or message == 59:
                for wait, *both in waiting:
                    wait()
                    found.append(all(map(torch.equal, *both)))
                waiting = []
        dist.barrier()
    return found


def turns_worker() -> list[int]:
    """The slots that this rank's messages take, two pieces each: two for each other rank, one for all, and again."""
    axis, taken = Axis.of_all(), []
    with on_a_cpu():
        assert share_on(axis)
        memory = host_memory.of_group(axis.group.group_name)
        slot = memory._slot

        def noted(source: int, index: int) -> Tensor:
            taken.extend([index] * (source == axis.rank))
            return slot(source, index)

        parts = torch.zeros(2, axis.size, 2 * host_memory.SLOT, dtype=torch.uint8)
        with mock.patch.object(memory, "_slot", noted):
            for _ in range(2):
                for sent in (parts[0], parts[0], parts[0, 0]):
                    memory.begin(sent if sent.ndim == 1 else sent.unbind(), parts[1].unbind())()
    return taken


def products_of_slices_worker(short: int, communication: str) -> list[bool]:
    """Whether products of slices of tokens, and sums, are right in each order of messages; what is sent is late. Of
    these lengths each rank's rows are cut where two are not short."""
    axis = replace(Axis.of_all(), communication=communication)

    def sum_parts(parts: Tensor) -> Tensor:
        assert outgoing.begun == outgoing.waited_for, "what is sent of a product may be gone"
        return parts.sum(0)

    with on_a_cpu(), mock.patch.object(peer_products, "SHORT", short):
        assert share_on(axis)
        outgoing = host_memory.of_group(axis.group.group_name)._outgoing
        outgoing.late = 5e-3
        with mock.patch.object(peer_products, "sum_parts", sum_parts):
            return products_in_order(axis, (9, 5), 1e-6 if communication == "exact" else 0.03)


def failed_capture_worker() -> list[bool]:
    """Whether messages come after each of two captures that fail, on each rank in another product."""
    axis, found = Axis.of_all(), []
    with on_a_cpu(), mock.patch.object(host_memory, "Queue", Held), mock.patch.object(peer_products, "SHORT", 1):
        assert share_on(axis)
        memory = host_memory.of_group(axis.group.group_name)
        for turn in range(2):
            succeed = 1 + (axis.rank + turn) % 2
            fails = mock.Mock(side_effect=[None] * succeed + [torch.OutOfMemoryError])
            Held.fails = True
            product = torch.ones(8, 4), torch.ones(4, 4), None
            with mock.patch.object(peer_products, "_multiply_into", fails), call_of_a_graph(captured=True):
                with contextlib.suppress(torch.OutOfMemoryError):
                    peer_products._scatter_through_host(memory, [product], False)
                assert fails.call_count == succeed + 1
            Held.fails = False
            with call_of_a_graph(captured=True):
                for message in range(4):
                    every = [randn(32, seed=10 * message + rank) for rank in range(2)]
                    received = collectives.exchange_in_group(every[axis.rank], [16] * 2, [16] * 2, axis.group)
                    found.append(torch.equal(received, torch.cat([x.chunk(2)[axis.rank] for x in every])))
    return found


@torch.no_grad()
def compiled_worker() -> list[bool]:
    """Whether messages of compiled code, of other sizes on each rank and two at once, are what was sent."""
    axis, counts, found = Axis.of_all(), COUNTS, []
    send, receive = list(counts[axis.rank]), [row[axis.rank] for row in counts]

    def two_messages(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, second = (begin_exchange(each, send, receive, axis.group) for each in (2 * x, x + 1))
        gathered = begin_compiled_gather(x[:5], axis.group)
        return first(), second() * 2, gathered()

    compiled = torch.compile(two_messages, fullgraph=True, options=HIDE_MESSAGES)
    with on_a_cpu():
        assert share_on(axis)
        begin = mock.Mock(side_effect=host_memory._memories[axis.group.group_name].begin)
        host_memory._memories[axis.group.group_name].begin = begin
        for turn in range(4):
            every = [randn(sum(row), seed=10 * turn + rank) for rank, row in enumerate(counts)]
            wanted = torch.cat([x.split(list(row))[axis.rank] for x, row in zip(every, counts, strict=True)])
            with call_of_a_graph(captured=turn > 0):
                answers = compiled(every[axis.rank])
            expected = 2 * wanted, (wanted + 1) * 2, torch.cat([x[:5] for x in every])
            found += map(torch.equal, answers, expected)
            found.append(begin.call_count == 3 * turn)
    return found


def share_worker(failing: str) -> tuple[bool, int, list[str]]:
    """Whether memory is shared where something fails on one rank, of two groups; how many forget it when one is no
    more; and files that are left."""
    axis, files, make = Axis.of_all(), [], host_memory.make_file

    def noted(world: int) -> str:
        files.append(make(world))
        return files[-1]

    def fails(*_: Any) -> None:
        raise OSError("no space\nleft")

    broken = contextlib.nullcontext()
    if axis.rank == 1 and failing in ("make_file", "_register"):
        broken = mock.patch.object(host_memory, failing, fails)
    elif axis.rank == 1 and failing == "room":
        broken = mock.patch.object(host_memory, "_LEFT", 1 << 60)
    elif failing == "slow":
        broken = mock.patch.object(host_memory_on_a_cpu, "FAST", False)
    elif axis.rank == 1 and failing:
        broken = mock.patch.object(HostMemory, "works", fails if failing == "works" else lambda _: False)
    group = dist.new_group([0, 1])
    with on_a_cpu(), mock.patch.object(host_memory, "make_file", noted), broken:
        answer = share_on(axis), share_on(replace(axis, group=group))
        count = len([*filter(None, host_memory._memories.values())])
        dist.destroy_process_group(group)
        count -= len([*filter(None, host_memory._memories.values())])
        dist.barrier()
    return answer, count, [*filter(os.path.exists, files)]


def never_captured(config: Even, model: torch.nn.Module, steps: list[dict[str, Any]]) -> list[Tensor]:
    """What a model, as a graph to be, answers by messages of the process group."""
    with mock.patch.object(step_graph, "WARM_UP", len(steps)):
        graph = StepGraph(model)
        outputs = [config.get_output(model, each) for each in steps]
        graph.remove()
    return outputs


OPERATIONS = {
    "by group": ("c10d::alltoall_base_", "_c10d_functional::all_to_all_single"),
    "slices": ("diffusers_rocm::gather_slices",),
}


@torch.no_grad()
def flux_worker(
    mesh: dict[str, Any], how: str, rotate_method: str, watched: bool
) -> tuple[float, list[int], dict[str, int]]:
    """The largest error of FLUX as a graph whose messages go through the host; how many do in a call before it is one,
    in one of the graph, and after; and collectives and gathers of slices in the graph's call. A watched model has its
    tokens whole."""
    config, begun = Even(), 0
    model, (first, *steps) = config.get_model(), steps_of(config.get_inputs(1), WARM_UP + 3)
    wanted = [config.get_output(model, each) for each in (first, *steps, first)]
    begin = HostMemory.begin

    def counted(*args: Any) -> Callable[[], None]:
        nonlocal begun
        begun += 1
        return begin(*args)

    def calls(step: dict[str, Any]) -> int:
        before = begun
        outputs.append(config.get_output(model, step))
        return begun - before

    found, outputs = [], []
    reached = mock.patch.object(step_graph, "reaches_host", share_on)
    slow = mock.patch.object(modeling_utils, "links_are_slow", lambda axis: axis.size > 1)
    recorded = mock.patch.object(step_graph, "record", Replayed())
    small = mock.patch.object(collectives, "COMPRESSED_FROM", 1)
    with on_a_cpu(1 << 12), slow, reached, recorded, small, mock.patch.object(HostMemory, "begin", counted):
        model.enable_parallelism(config=ParallelConfig(**mesh, rotate_method=rotate_method))
        if how == "compiled":
            torch._dynamo.reset()
            model.compile_repeated_blocks(fullgraph=True)
        if watched:
            model.transformer_blocks[0].register_forward_hook(lambda *_: None)
        if "communication" in mesh:  # rounds, by the process group as well
            wanted[0] = wanted[-1] = config.get_output(model, first)
            wanted[1:-1] = never_captured(config, model, steps)
        found.append(calls(first))
        graph = StepGraph(model)
        outputs += [config.get_output(model, each) for each in steps[:-1]]
        with torch.profiler.profile() as profile:
            found.append(calls(steps[-1]))
        names = [event.name for event in profile.events()]
        graph.remove()
        found.append(calls(first))
    of_graph = {name: sum(map(names.count, operations)) for name, operations in OPERATIONS.items()}
    return max(map(relative_l2, outputs, wanted)), found, of_graph


def gpu_worker(mesh: dict[str, Any], how: str, rotate_method: str) -> tuple[float, dict[str, int]]:
    """The error of FLUX as a graph over links that are taken for slow, and what its replay launches."""
    slow = mock.patch.object(modeling_utils, "links_are_slow", lambda axis: axis.size > 1)
    with slow, mock.patch.object(links, "SLOWER", 0.0):
        error, names, _ = on_gpus(Even(), how == "compiled", **mesh, rotate_method=rotate_method)
    return error, count_parts(names, "Memcpy DtoH", "Memcpy HtoD", "SendRecv", "AllGather", "AllReduce")


def trial_worker(mixed_up: bool) -> tuple[bool, float]:
    """Whether memory is shared, where one rank may take the files for those of others; and the seconds it takes."""
    axis, files, begun = Axis.of_all(), HostMemory.__init__, time.monotonic()

    def otherwise(memory: HostMemory, paths: list[str], *args: Any) -> None:
        files(memory, paths[::-1] if mixed_up and axis.rank == 0 else paths, *args)

    patient = mock.patch.object(host_memory, "_PATIENCE", 1.0)
    with mock.patch.object(HostMemory, "__init__", otherwise), mock.patch.object(links, "SLOWER", 0.0), patient:
        answer = links.reaches_host(axis)
    host_memory.forget()
    return answer, time.monotonic() - begun


def fast_links_worker() -> tuple[bool, bool]:
    """Whether messages go through the host's memory where ranks reach each other's, and when asked again."""
    axis = Axis.of_all()
    answer = links.reaches_host(axis)
    with mock.patch.object(links, "SLOWER", 0.0):
        again = links.reaches_host(axis)
    host_memory.forget()
    return answer, again


MESHES = (
    ("ulysses", {"ulysses": 2}, "p2p"),
    ("ring", {"ring": 2}, "p2p"),
    ("ring, gathered", {"ring": 2}, "allgather"),
)
BOTH = [(f"{name}, {how}", degrees, how, method) for name, degrees, method in MESHES for how in ("eager", "compiled")]


# Of one forward of so few blocks in 8 bits, which is 1% off.
ROUNDED_BAR = 0.02


class TestHostMemory(unittest.TestCase):
    def test_exchange(self):
        for found in run_ranks(3, exchange_worker):
            self.assertEqual(found, [True] * (4 * 7 + 1))

    @parameterized.expand([3, 4])
    def test_any_messages(self, world):
        for found in run_ranks(world, any_messages_worker, world):
            self.assertEqual(found, [True] * 60)

    @parameterized.expand([2, 3])
    def test_slots_are_taken_in_turn(self, world):
        for taken in run_ranks(world, turns_worker):
            of_each = 2 * (2 * 2 * (world - 1) + 2)
            starts = [0, *(index for index in range(1, of_each) if taken[index] != (taken[index - 1] + 1) % 4)]
            # But for what is for all, of whose slot others know nothing of what this rank has sent to each.
            self.assertEqual(len(taken), of_each)
            self.assertLessEqual(set(starts), {0, of_each // 2 - 2, of_each // 2, of_each - 2})

    def test_compiled(self):
        for found in run_ranks(3, compiled_worker):
            self.assertEqual(found, [True] * 16)

    @parameterized.expand([(1, "exact"), (1, "int8"), (6, "exact"), (10, "int8")])
    def test_products_of_slices(self, short, communication):
        for world in (2, 3):
            for found in run_ranks(world, products_of_slices_worker, short, communication):
                self.assertEqual(found, [True] * 3 * len(ORDERS))

    def test_after_captures_that_fail(self):
        for found in run_ranks(2, failed_capture_worker):
            self.assertEqual(found, [True] * 8)

    @parameterized.expand(["", "make_file", "_register", "works", "works not", "slow", "room"])
    def test_share(self, failing):
        for answer, count, left in run_ranks(2, share_worker, failing):
            self.assertEqual((answer, count, left), ((not failing,) * 2, int(not failing), []))

    def test_a_file_of_another_container(self):
        """torch would make it, and share it with nobody."""
        with on_a_cpu(), tempfile.TemporaryDirectory() as folder, self.assertRaises(FileNotFoundError):
            HostMemory([f"{folder}/first", f"{folder}/second"], 0, torch.device("cpu"))

    def test_of_captured_calls_alone(self):
        memory = object()
        with mock.patch.dict(host_memory._memories, {"group": memory}):
            found = [host_memory.of_captured_call("group")]
            for captured in (False, True):
                with call_of_a_graph(captured):
                    found += [host_memory.of_captured_call("group"), host_memory.of_captured_call("another")]
        self.assertEqual(found, [None, None, None, memory, None])

    @parameterized.expand(BOTH)
    def test_flux(self, name, degrees, how, rotate_method):
        self.check_flux(2, degrees, how, rotate_method)

    @parameterized.expand(
        [
            ("slices", {"tp": 2}, "compiled", False),
            ("slices in 8 bits", {"tp": 4, "communication": "int8"}, "eager", False),
            ("sums in 8 bits", {"tp": 4, "communication": "int8"}, "eager", True),
            ("sums in 8 bits, compiled", {"tp": 4, "communication": "int8"}, "compiled", True),
            ("two by two", {"tp": 2, "ulysses": 2}, "eager", False),
        ]
    )
    def test_tensor_parallel(self, name, mesh, how, watched):
        self.check_flux(math.prod(mesh[each] for each in ("tp", "ulysses") if each in mesh), mesh, how, "p2p", watched)

    def check_flux(
        self, world: int, mesh: dict[str, Any], how: str, rotate_method: str, watched: bool = False
    ) -> None:
        # Of two blocks of two streams, and two of one.
        slices = 2 * 3 + 2 if "tp" in mesh and not watched else 0
        for error, (before, captured, after), of_graph in run_ranks(
            world, flux_worker, mesh, how, rotate_method, watched
        ):
            self.assertLessEqual(error, FLOAT32_BAR)
            self.assertEqual((before, after, of_graph), (0, 0, {"by group": 0, "slices": slices}))
            self.assertGreater(captured, 0)

    @parameterized.expand(
        [
            *BOTH,
            ("slices", {"tp": 2}, "compiled", "p2p"),
            ("slices in 8 bits", {"tp": 2, "communication": "int8"}, "compiled", "p2p"),
            ("slices in 8 bits, eager", {"tp": 2, "communication": "int8"}, "eager", "p2p"),
        ]
    )
    @require_torch_multi_accelerator
    def test_gpus(self, name, mesh, how, rotate_method):
        self.check_gpus(2, mesh, how, rotate_method)

    @parameterized.expand(
        [
            ({"ulysses": 4}, "compiled"),
            ({"ring": 2, "ulysses": 2}, "eager"),
            ({"tp": 4}, "compiled"),
            ({"tp": 4, "communication": "int8"}, "compiled"),
            ({"tp": 2, "ulysses": 2}, "compiled"),
        ]
    )
    @require_torch_accelerators(4)
    def test_four_gpus(self, mesh, how):
        self.check_gpus(4, mesh, how, "p2p")

    def check_gpus(self, world: int, mesh: dict[str, Any], how: str, rotate_method: str) -> None:
        axes = len(mesh.keys() & {"tp", "ring", "ulysses"})
        for error, found in run_ranks(world, gpu_worker, mesh, how, rotate_method, device="cuda"):
            self.assertLessEqual(error, ROUNDED_BAR if "communication" in mesh else FLOAT32_BAR)
            self.assertGreater(min(found["Memcpy DtoH"], found["Memcpy HtoD"]), 0, found)
            self.assertEqual((found["SendRecv"], found["AllReduce"]), (0, 0), found)
            # Of two axes modulation is gathered by a group of both, and so is the answer, but that of `tp` by itself.
            self.assertEqual(found["AllGather"], 0 if axes == 1 else 1 if "tp" in mesh else 2, found)

    @parameterized.expand([(False,), (True,)])
    @require_torch_multi_accelerator
    def test_trial(self, mixed_up):
        for answer, seconds in run_ranks(2, trial_worker, mixed_up, device="cuda"):
            self.assertEqual(answer, not mixed_up)
            self.assertLess(seconds, 60)

    @require_torch_multi_accelerator
    def test_over_fast_links(self):
        """Not, since they are faster; asked again, the answer is the first one."""
        if not torch.cuda.can_device_access_peer(0, 1):
            self.skipTest("GPUs that do not reach each other's memory")
        for answers in run_ranks(2, fast_links_worker, device="cuda"):
            self.assertEqual(answers, (False, False))
