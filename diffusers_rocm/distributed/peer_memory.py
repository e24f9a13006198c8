"""Messages by copies out of the other ranks' memory, which occupy no multiprocessor.

A kernel of NCCL beside a product takes multiprocessors from it, and over fast links costs what it hides; a copy engine
takes none. So in a graph of a step a message is laid where the other ranks reach it, in torch's symmetric memory, and
they fetch it from there. Without a graph, where each copy would cost the host a launch, it goes by the process group.

Each group has two places, which its messages take in turn. Ranks meet once for a message, between writing and fetching
it, and none comes there before it has fetched the last one. So when they have met for a message, all have fetched what
was in the place that the next one takes. A long message, which is fetched a rank at a time, has a third place, and
ranks meet before it is written, too.
"""

import functools
import hashlib
import itertools
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from .axis import timeout_of
from .beside import copy_beside
from .graph_calls import come_to, current_call, register
from .host_memory import tried


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Place:
    """Bytes of this rank's memory that the others of a group reach, and torch's handle of all ranks'."""

    bytes: Tensor
    memory: Any


# The place of long messages; those of others are 0 and 1.
_LONG = 2

# For each group its places, or None where they could not be made; and those that were too small for a later call, or
# of such a group, which older graphs still use until the group is forgotten.
_places: dict[str, dict[int, _Place] | None] = {}
_outgrown: dict[str, list[_Place]] = {}
# How many tensors this process has shared.
_shared = 0


def version_of(file: str) -> str:
    """Of operations that a file lowers: compiled code is kept on disk, and must not be that of another version."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:8]


_VERSION = version_of(__file__)

_library = torch.library.Library("diffusers_rocm", "FRAGMENT")
_library.define("next_place(SymInt[] shape, str group, *, ScalarType dtype, Device device) -> Tensor")
# By these names the compiler estimates how long a message takes.
_KINDS = ("all_to_all", "all_gather")
for _kind in _KINDS:
    _library.define(f"fetch_{_kind}(Tensor place, int world, str group) -> Tensor")
    _library.define(
        f"{_kind}_by_copies(Tensor[] parts, int dim, int world, str group, str version, Tensor? later=None) -> Tensor"
    )
_ours = torch.ops.diffusers_rocm


def forget_places(group: dist.ProcessGroup | None = None) -> None:
    """Let the places of a group go, before itself does; of all groups by default."""
    if group is None:
        _places.clear()
        _outgrown.clear()
    else:
        _places.pop(group.group_name, None)
        _outgrown.pop(group.group_name, None)


def held_bytes() -> int:
    """What places take of this rank's GPU, which torch's allocator does not count."""
    of_groups = (places.values() for places in filter(None, _places.values()))
    return sum(place.bytes.nbytes for places in (*of_groups, *_outgrown.values()) for place in places)


def _next_place(shape: Sequence[int], group: str, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Where this rank lays its next message: in a captured call, where the others reach it.

    It is fetched before the next one is asked for.
    """
    memory = take_place(math.prod(shape) * dtype.itemsize, device, group)
    if memory is None:
        return torch.empty(shape, dtype=dtype, device=device)
    current_call().taken[group] = memory
    return memory.get_buffer(dist.distributed_c10d._resolve_process_group(group).rank(), shape, dtype)


def _fetch_all_to_all(place: Tensor, world: int, group: str) -> Tensor:
    """What all ranks have laid for this one where `_next_place` told them."""
    return _fetch(place.view(-1), place.numel() // world, world, group)


def _fetch_all_gather(place: Tensor, world: int, group: str) -> Tensor:
    """What all ranks have laid for all."""
    return _fetch(place.view(-1), place.numel(), world, group)


def _fetch(x: Tensor, count: int, world: int, group: str) -> Tensor:
    """Of what each rank has laid, as this one has `x`: `count` elements, all of it, or the part for this rank."""
    call, to_all = current_call(), count == x.numel()
    memory = None if call is None else call.taken.pop(group, None)
    if memory is None:
        return _by_group(x, count, world, group)
    rank = dist.distributed_c10d._resolve_process_group(group).rank()
    assert x.data_ptr() == memory.get_buffer(rank, x.shape, x.dtype).data_ptr()
    received, offset = x.new_empty(world * count), 0 if to_all else rank * count
    into = received.chunk(world)
    into[rank].copy_(x.narrow(0, offset, count))  # by a kernel, which would wait for those that come next
    meet(memory, group, x.device)
    others = ((rank + step) % world for step in range(1, world))
    pairs = ((into[peer], memory.get_buffer(peer, (count,), x.dtype, offset)) for peer in others)
    call.coming[group] = register(received, copy_beside(pairs, x.device))
    return received


def _by_copies(
    kind: str, parts: list[Tensor], dim: int, world: int, group: str, version: str, later: Tensor | None = None
) -> Tensor:
    place = _ours.next_place(_joined_shape(parts, dim), group, dtype=parts[0].dtype, device=parts[0].device)
    return getattr(_ours, f"fetch_{kind}")(torch.cat(parts, dim, out=place), world, group)


def _joined_shape(parts: Sequence[Any], dim: int) -> list[Any]:
    shape = list(parts[0].shape)
    return [*shape[:dim], sum(part.shape[dim] for part in parts), *shape[dim + 1 :]]


def take_place(size: int, device: torch.device, group: str) -> Any:
    """torch's handle of the memory that the next message of a group takes, `size` bytes of each rank.

    None where it does not go by copies. Of what is there all ranks have fetched, and read, all when they have met for
    this message (`meet`), and they meet once for each.
    """
    call = current_call()
    if call is None:
        return None
    index = 1 - call.turn.get(group, 1)
    place = _find_place(size, index, device, group)
    if place is not None and group not in call.turn:
        meet(place.memory, group, device)  # of the call before, all have fetched all
    call.turn[group] = index
    return place and place.memory


def lay_for_all(
    tensors: Sequence[Tensor], dim: int, largest: int, group: str
) -> tuple[Tensor, Callable[[int, int], Callable[[], Tensor]]] | None:
    """Lay a long message, of `tensors` joined along `dim`, where all ranks of a group fetch it when they want it.

    All of them have fetched all that they want before they lay the next one.

    Args:
        largest: elements of the longest of all ranks' messages.

    Returns:
        The message, where it lies, and what begins to fetch that of a rank, given it and how many elements it has: it
        answers what waits, and answers them [n]. None where messages do not go by copies.
    """
    shape, dtype, device = _joined_shape(tensors, dim), tensors[0].dtype, tensors[0].device
    place = _find_place(largest * dtype.itemsize, _LONG, device, group)
    if place is None:
        return None
    memory, rank = place.memory, dist.distributed_c10d._resolve_process_group(group).rank()
    meet(memory, group, device)
    message = torch.cat(tensors, dim, out=memory.get_buffer(rank, shape, dtype))
    meet(memory, group, device)

    def fetch(peer: int, count: int) -> Callable[[], Tensor]:
        received = torch.empty(count, dtype=dtype, device=device)
        return come_to(received, copy_beside([(received, memory.get_buffer(peer, (count,), dtype))], device))

    return message, fetch


def _find_place(size: int, index: int, device: torch.device, group: str) -> _Place | None:
    """A place of a captured call, if there is room; before, it is made."""
    call = current_call()
    if call is not None and not call.captured:
        _make_room(size, index, device, group)
    place = _room(size, index, group) if call is not None and call.captured else None
    if place is not None:
        call.by_copies = True
    return place


def slices_on_their_way() -> dict[int, Any]:
    """Of the call that is captured, by the address of where they come to."""
    call = current_call()
    return {} if call is None else call.slices


def meet(memory: Any, group: str, device: torch.device) -> None:
    """Wait until all ranks have come here, each with all that it has begun to fetch."""
    coming = current_call().coming
    if group in coming:
        coming.pop(group).wait()
    process_group = dist.distributed_c10d._resolve_process_group(group)
    memory.barrier(channel=0, timeout_ms=_timeout(process_group, device))


def _room(size: int, index: int, group: str) -> _Place | None:
    """The place of this index, if it has `size` bytes."""
    place = (_places.get(group) or {}).get(index)
    return place if place is not None and place.bytes.numel() >= size else None


def _make_room(size: int, index: int, device: torch.device, group: str) -> None:
    """A place of `size` bytes for messages, which all ranks of the group make, or none ever."""
    places = _places.setdefault(group, {})
    if places is None or _room(size, index, group) is not None:
        return
    grows = index in places  # by a quarter more, so that it seldom does
    place = _share(size + grows * (size // 64) * 16, device, dist.distributed_c10d._resolve_process_group(group))
    if place is None:
        _outgrown.setdefault(group, []).extend(places.values())
        _places[group] = None
        return
    if grows:
        _outgrown.setdefault(group, []).append(places[index])
    places[index] = place


def _share(size: int, device: torch.device, group: dist.ProcessGroup) -> _Place | None:
    """A place of `size` bytes on all ranks of a group, who call it; None if one of them cannot share it.

    torch counts by process what it shares, with other groups too, and ranks that count otherwise would wait for each
    other: those that have shared less catch up.
    """
    global _shared
    made = tried(lambda: symmetric.empty(size, dtype=torch.uint8, device=device))
    counts = _numbers_of_all(-1 if made is None else _shared, device, group)
    if -1 not in counts and len(set(counts)) > 1:
        caught_up = _shared == max(counts) or tried(lambda: _share_alone(max(counts) - _shared, device))
        counts = _numbers_of_all(_shared if caught_up else -1, device, group)
    if -1 in counts:
        return None
    _shared += 1
    memory = tried(lambda: symmetric.rendezvous(made, group.group_name))
    return None if -1 in _numbers_of_all(-1 if memory is None else 0, device, group) else _Place(made, memory)


def _numbers_of_all(own: int, device: torch.device, group: dist.ProcessGroup) -> list[int]:
    x = torch.tensor([own], device=device)
    numbers = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(numbers, x, group=group)
    return [int(number) for number in numbers]


def _share_alone(times: int, device: torch.device) -> bool:
    """Share memory in a group of this rank alone, of which the others know nothing."""
    global _shared
    timeout = timedelta(minutes=1)
    alone = dist.new_group([dist.get_rank()], timeout, "gloo", use_local_synchronization=True)
    try:
        for _ in range(times):
            symmetric.rendezvous(symmetric.empty(1, dtype=torch.uint8, device=device), alone.group_name)
            _shared += 1
    finally:
        dist.destroy_process_group(alone)
    return True


def _timeout(group: dist.ProcessGroup, device: torch.device) -> int:
    """Milliseconds that the ranks of a group wait for each other."""
    return timeout_of(group, device) // timedelta(milliseconds=1)


def _by_group(x: Tensor, count: int, world: int, group: str) -> Tensor:
    if count == x.numel():
        return torch.ops._c10d_functional.all_gather_into_tensor(x, world, group)
    return torch.ops._c10d_functional.all_to_all_single(x, [count] * world, [count] * world, group)


_library.impl("next_place", _next_place, "CompositeExplicitAutograd")
for _kind, _function in zip(_KINDS, (_fetch_all_to_all, _fetch_all_gather), strict=True):
    for _device in ("CUDA", "CPU"):
        _library.impl(f"fetch_{_kind}", _function, _device)
        _library.impl(f"{_kind}_by_copies", functools.partial(_by_copies, _kind), _device)


@torch.library.register_fake("diffusers_rocm::next_place", lib=_library)
def _(shape, group, *, dtype, device):
    return torch.empty(shape, dtype=dtype, device=device)


@torch.library.register_fake("diffusers_rocm::fetch_all_to_all", lib=_library)
def _(place, world, group):
    return torch.empty_like(place).view(-1)


@torch.library.register_fake("diffusers_rocm::fetch_all_gather", lib=_library)
def _(place, world, group):
    return place.new_empty(world * place.numel())


@torch.library.register_fake("diffusers_rocm::all_to_all_by_copies", lib=_library)
def _(parts, dim, world, group, version, later=None):
    return parts[0].new_empty(sum(part.numel() for part in parts))


@torch.library.register_fake("diffusers_rocm::all_gather_by_copies", lib=_library)
def _(parts, dim, world, group, version, later=None):
    return parts[0].new_empty(world * sum(part.numel() for part in parts))


@functools.cache
def teach_compiler() -> bool:
    """What makes a message writes it where it is fetched; the rest is a collective, whose start and end are apart."""
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering
    from torch._inductor.virtualized import V

    last: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()

    def read(operation: ir.Operation) -> set[str]:
        return {each.name for each in operation.get_read_writes().reads}

    def makers(names: Iterable[str]) -> set[str]:
        """The operations that make what has these names, and all that it is made of."""
        found, names = set(), [*names]
        while names:
            buffer = V.graph.name_to_buffer.get(names.pop())  # none of what the graph is given
            operation = buffer and buffer.get_defining_op()
            if operation is not None and operation.get_operation_name() not in found:
                found.add(operation.get_operation_name())
                names += read(operation)
        return found

    def only_for(later: ir.TensorBox, parts: list[ir.TensorBox]) -> set[str]:
        """What is computed for it, and neither for the parts of a message nor for anything sent before."""
        computed = ir.ComputedBuffer, ir.ConcatKernel, ir.ExternKernelOut, ir.TemplateBuffer
        others = [each for each in V.graph.operations if not isinstance(each, computed) or each.get_mutation_names()]
        needed = makers(set().union(*map(read, others), *(part.get_read_names() for part in parts)))
        return makers(later.get_read_names()) - needed - {each.get_operation_name() for each in others}

    def lower(
        fetch: Any,
        parts: list[ir.TensorBox],
        dim: int,
        world: int,
        group: str,
        version: str,
        later: ir.TensorBox | None = None,
    ) -> ir.TensorBox:
        first, fetched = len(V.graph.operations), last.setdefault(V.graph, {})
        waiting = set() if later is None else only_for(later, parts)
        options = {"dtype": parts[0].get_dtype(), "device": parts[0].get_device()}
        shape = _joined_shape(parts, dim)
        place = ir.TensorBox.create(ir.FallbackKernel.create(_ours.next_place.default, shape, group, **options))
        # It is asked for when the last message has been fetched, and is never memory for anything else.
        for operation in V.graph.operations[first:]:
            V.graph.never_reuse_buffers.update(each.get_name() for each in operation.get_outputs())
            if group in fetched:
                V.graph.additional_buffer_deps[operation.get_operation_name()].add(fetched[group])
        stops = [*itertools.accumulate((part.shape[dim] for part in parts), initial=0)]
        for part, (start, stop) in zip(parts, itertools.pairwise(stops), strict=True):
            copy = ir.Pointwise.create(
                inner_fn=part.make_loader(), ranges=part.get_size(), dtype=part.get_dtype(), device=part.get_device()
            )
            into = ir.SliceView.create(place.data, dim, start, stop, clamp=False)
            ir.MutationLayoutSHOULDREMOVE.realize_into(copy, into, unsafe_alias=True)
        received = ir._CollectiveKernel.create_out_of_place(fetch, place, world, group)
        fetched[group] = received.get_name()
        for name in waiting:
            V.graph.additional_buffer_deps[name].add(received.get_name())
        return ir.TensorBox.create(received)

    for operation, fetch in (
        (_ours.all_to_all_by_copies.default, _ours.fetch_all_to_all.default),
        (_ours.all_gather_by_copies.default, _ours.fetch_all_gather.default),
    ):
        register_lowering(operation, type_promotion_kind=None)(functools.partial(lower, fetch))
    return True


def exchange_by_copies(parts: list[Tensor], dim: int, world: int, group: dist.ProcessGroup) -> Tensor:
    """An all-to-all of equal parts, which goes by copies in a graph.

    Args:
        parts: of one dtype; joined along `dim`, not negative, as many elements for each rank, in their order.

    Returns:
        [n], what came of each rank, in their order.
    """
    coming = _ours.all_to_all_by_copies(parts, dim, world, group.group_name, _VERSION)
    return torch.ops._c10d_functional.wait_tensor(coming)


def gather_by_copies(
    parts: list[Tensor], dim: int, world: int, group: dist.ProcessGroup, later: Tensor | None = None
) -> Tensor:
    """A gather of as much of each rank, which goes by copies in a graph.

    Args:
        parts: [n, ...] each, of one dtype; joined along `dim`, above 0.
        later: what is beside the message in compiled code: it is made when that has begun, but for what both need.

    Returns:
        [world x n, ...], what came of each rank, in their order.
    """
    later = None if later is None else later.detach()  # whose order it is, not whose value
    coming = _ours.all_gather_by_copies(parts, dim, world, group.group_name, _VERSION, later)
    return torch.ops._c10d_functional.wait_tensor(coming).view(-1, *_joined_shape(parts, dim)[1:])


def can_fetch(group: dist.ProcessGroup, device: torch.device, on_all: Callable[[bool], bool]) -> bool:
    """Whether all ranks of a group find in symmetric memory what the others wrote there; all of them call it.

    Args:
        on_all: tells whether something is so on all ranks. They ask after each step, so that in the next none waits
            for one that has failed.
    """
    place = tried(lambda: _share(torch.int64.itemsize, device, group))
    if not on_all(place is not None):
        return False
    place.bytes.view(torch.int64).fill_(group.rank())
    memory = place.memory

    def numbers() -> list[int]:
        memory.barrier(channel=0, timeout_ms=_timeout(group, device))
        found = [memory.get_buffer(peer, (1,), torch.int64).item() for peer in range(group.size())]
        memory.barrier(channel=0, timeout_ms=_timeout(group, device))
        return found

    return on_all(tried(numbers) == list(range(group.size()))) and on_all(tried(teach_compiler) is not None)
