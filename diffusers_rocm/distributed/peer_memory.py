"""An all-to-all by copies out of the other ranks' memory, which occupy no multiprocessor.

A kernel of NCCL beside a product takes multiprocessors from it, and over fast links costs what it hides; a copy engine
takes none. So in a graph of a step a message is laid where the other ranks reach it, in torch's symmetric memory, and
they fetch it from there. Without a graph, where each copy would cost the host a launch, it goes by the process group.

Each group has two places, which its messages take in turn. Ranks meet once for a message, between writing and fetching
it, and none comes there before it has fetched the last one. So when they have met for a message, all have fetched what
was in the place that the next one takes.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from .beside import copy_beside


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Place:
    """Bytes of this rank's memory that the others of a group reach, and torch's handle of all ranks'."""

    bytes: Tensor
    memory: Any


@dataclass
class _Call:
    """A call of a model, captured or to be captured next: which place each group's next message takes."""

    captured: bool
    turn: dict[str, int] = field(default_factory=dict)
    # What is not waited for yet.
    coming: dict[str, "_Coming"] = field(default_factory=dict)


# For each group its places, and those that were too small for a later call, which older graphs still use.
_places: dict[str, list[_Place]] = {}
_outgrown: list[_Place] = []
_call: _Call | None = None
# How many tensors this process has shared.
_shared = 0

_library = torch.library.Library("diffusers_rocm", "FRAGMENT")
_library.define("all_to_all_by_copies(Tensor x, int world, str group) -> Tensor")


class _Coming(dist.Work):
    """A message on its way: the stream that waits for it goes on when it is there."""

    def __init__(self, arrive: Callable[[], None]):
        super().__init__()
        self.arrive: Callable[[], None] | None = arrive

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self.arrive is not None:
            self.arrive()
        self.arrive = None
        return True


@contextlib.contextmanager
def call_of_a_graph(captured: bool) -> Iterator[None]:
    """Around a call of a model: captured, its messages go by copies; before it is, places are made for them.

    All ranks of a group call it alike, at least once before they capture.
    """
    global _call
    before, _call = _call, _Call(captured)
    try:
        yield
    finally:
        _call = before


def in_call_of_a_graph() -> bool:
    return _call is not None


def forget_places() -> None:
    """Let all places go, before process groups are."""
    _places.clear()
    _outgrown.clear()


def held_bytes() -> int:
    """What places take of this rank's GPU, which torch's allocator does not count."""
    return sum(place.bytes.nbytes for places in (*_places.values(), _outgrown) for place in places)


def _all_to_all(x: Tensor, world: int, group: str) -> Tensor:
    if _call is None:
        return _by_group(x, world, group)
    places, turn = _places.setdefault(group, []), _call.turn.get(group)
    index = 0 if turn is None else 1 - turn
    if not _call.captured:
        _make_room(places, index, x, group)
        _call.turn[group] = index
        return _by_group(x, world, group)
    if index >= len(places) or places[index].bytes.numel() < x.nbytes:
        return _by_group(x, world, group)
    process_group = dist.distributed_c10d._resolve_process_group(group)
    memory, rank, count = places[index].memory, process_group.rank(), x.numel() // world
    meet = functools.partial(memory.barrier, channel=0, timeout_ms=_timeout(process_group, x.device))
    if turn is None:
        meet()  # of the call before, all have fetched all
    memory.get_buffer(rank, x.shape, x.dtype).copy_(x)
    received = torch.empty_like(x)
    into = received.chunk(world)
    into[rank].copy_(x.chunk(world)[rank])  # by a kernel, which would wait for those that come next
    if group in _call.coming:
        _call.coming.pop(group).wait()
    meet()
    others = ((rank + step) % world for step in range(1, world))
    pairs = ((into[peer], memory.get_buffer(peer, (count,), x.dtype, rank * count)) for peer in others)
    coming = _Coming(copy_beside(pairs, x.device))
    torch._C._distributed_c10d._register_work(received, coming)
    _call.turn[group], _call.coming[group] = index, coming
    return received


def _make_room(places: list[_Place], index: int, x: Tensor, group: str) -> None:
    """A place for a message as large as `x`, which all ranks of the group make, or none."""
    if index < len(places) and places[index].bytes.numel() >= x.nbytes:
        return
    grows = index < len(places)  # by a quarter more, so that it seldom does
    made = symmetric.empty(x.nbytes + grows * (x.nbytes // 64) * 16, dtype=torch.uint8, device=x.device)
    memory = _share(made, dist.distributed_c10d._resolve_process_group(group))
    if memory is None:
        return
    place = _Place(made, memory)
    if grows:
        _outgrown.append(places[index])
        places[index] = place
    else:
        places.append(place)


def _share(x: Tensor, group: dist.ProcessGroup) -> Any:
    """torch's handle of `x` on all ranks of a group, who call it; None if they have asked for other numbers of them.

    torch counts them by process: those of other groups too. Ranks that count otherwise would wait for each other.
    """
    global _shared
    counts = [torch.tensor([_shared], device=x.device) for _ in range(group.size())]
    dist.all_gather(counts, counts[0].clone(), group=group)
    if len({int(count) for count in counts}) > 1:
        return None
    _shared += 1
    return symmetric.rendezvous(x, group.group_name)


def _timeout(group: dist.ProcessGroup, device: torch.device) -> int:
    """Milliseconds that the ranks of a group wait for each other."""
    return group._get_backend(device).options._timeout // timedelta(milliseconds=1)


def _by_group(x: Tensor, world: int, group: str) -> Tensor:
    sizes = [x.numel() // world] * world
    return torch.ops._c10d_functional.all_to_all_single(x, sizes, sizes, group)


_library.impl("all_to_all_by_copies", _all_to_all, "CUDA")
_library.impl("all_to_all_by_copies", _all_to_all, "CPU")
_library.impl("all_to_all_by_copies", lambda x, world, group: torch.empty_like(x), "Meta")
_operation = torch.ops.diffusers_rocm.all_to_all_by_copies.default


@functools.cache
def teach_compiler() -> bool:
    """The operation is a collective, whose start and end the compiler moves apart."""
    from torch._inductor import ir
    from torch._inductor.lowering import add_layout_constraint, constrain_to_fx_strides, register_lowering

    add_layout_constraint(_operation, constrain_to_fx_strides)

    @register_lowering(_operation, type_promotion_kind=None)
    def lower(x: ir.TensorBox, world: int, group: str) -> ir.TensorBox:
        return ir.TensorBox.create(ir._CollectiveKernel.create_out_of_place(_operation, x, world, group))

    return True


def exchange_by_copies(x: Tensor, world: int, group: dist.ProcessGroup) -> Tensor:
    """An all-to-all of `x` [n], of equal parts, which goes by copies in a graph."""
    return torch.ops._c10d_functional.wait_tensor(_operation(x, world, group.group_name))


def can_fetch(group: dist.ProcessGroup, device: torch.device, on_all: Callable[[bool], bool]) -> bool:
    """Whether all ranks of a group find in symmetric memory what the others wrote there; all of them call it.

    Args:
        on_all: tells whether something is so on all ranks. They ask after each step, so that in the next none waits
            for one that has failed.
    """
    number = _tried(lambda: symmetric.empty(1, dtype=torch.int64, device=device).fill_(group.rank()))
    if not on_all(number is not None):
        return False
    memory = _tried(lambda: _share(number, group))
    if not on_all(memory is not None):
        return False

    def numbers() -> list[int]:
        memory.barrier(channel=0, timeout_ms=_timeout(group, device))
        found = [memory.get_buffer(peer, (1,), torch.int64).item() for peer in range(group.size())]
        memory.barrier(channel=0, timeout_ms=_timeout(group, device))
        return found

    return on_all(_tried(numbers) == list(range(group.size()))) and on_all(_tried(teach_compiler) is not None)


def _tried(step: Callable[[], Any]) -> Any:
    """Its answer; None where it fails, of which the log says why."""
    try:
        return step()
    except Exception as error:
        logger.warning(f"this rank cannot reach the others' memory: {str(error).partition(chr(10))[0]}")
        return None
