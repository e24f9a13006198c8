"""Products beside the copies of their input, or of their output, for tensor parallelism over slices of tokens.

Between products each rank has a slice of the tokens (Korthikanti et al., 2022, "Reducing activation recomputation in
large transformer models"). In a graph of a step the slices are fetched out of the other ranks' memory, and what has
come of one rank is multiplied while that of the next comes; and what is for one rank is laid in its memory while that
for the next is multiplied (Wang et al., 2023, "Overlap communication with dependent computation via decomposition").
No multiprocessor copies but what is short. Without a graph both go by the process group.

Where messages are laid, and when ranks meet, is that of `peer_memory`.
"""

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .axis import Axis
from .beside import copy_beside
from .parts import sum_parts
from .peer_memory import meet, slices_on_their_way, take_place, version_of


# Fewer rows of a rank are not worth parts: products of so few would be slower than the message that they hide, which
# then goes by one kernel in place of several copies.
SHORT = 512


@dataclass(frozen=True)
class _Slices:
    """Rows of all ranks, on their way.

    Attributes:
        every: where they come to, which is kept until they have.
        own: this rank's, which are there.
        parts: ranks and what waits for their rows, in the order in which they come, this rank's last.
    """

    every: Tensor
    own: Tensor
    parts: list[tuple[int, Callable[[], None]]]


_library = torch.library.Library("diffusers_rocm", "FRAGMENT")
_VERSION = version_of(__file__)
_library.define("gather_slices(Tensor[] slices, int world, str group, bool at_once, str version) -> Tensor[]")
_library.define("multiply(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor[]")
_library.define(
    "multiply_and_scatter("
    "Tensor[] tensors, Tensor[] weights, Tensor?[] biases, int world, str group, str version) -> Tensor[]"
)
_ours = torch.ops.diffusers_rocm


def _gather_slices(slices: list[Tensor], world: int, group: str, at_once: bool, version: str) -> list[Tensor]:
    on_their_way, device = slices_on_their_way(), slices[0].device
    memory = take_place(sum(x.nbytes for x in slices), device, group)
    process_group = dist.distributed_c10d._resolve_process_group(group)
    every = [x.new_empty(world * len(x), *x.shape[1:]) for x in slices]
    if memory is None:
        _wait_for(on_their_way)
        for x, into in zip(slices, every, strict=True):
            dist.all_gather(list(into.chunk(world)), x.contiguous(), group=process_group)
        return every
    rank, offsets = process_group.rank(), _offsets([x.numel() for x in slices])
    own = [memory.get_buffer(rank, x.shape, x.dtype, offset) for x, offset in zip(slices, offsets, strict=True)]
    for place, x in zip(own, slices, strict=True):
        place.copy_(x)
    _wait_for(on_their_way)
    meet(memory, group, device)
    for index in _long_first(slices):
        x, offset = slices[index], offsets[index]
        theirs = [memory.get_buffer(peer, x.shape, x.dtype, offset) for peer in range(world)]
        if len(x) < SHORT:
            torch.cat(theirs, out=every[index])
            continue
        parts, coming = every[index].chunk(world), []
        for peer in _others_first(rank, world):
            coming.append((peer, copy_beside([(parts[peer], theirs[peer])], device)))
        on_their_way[every[index].data_ptr()] = _Slices(every[index], own[index], coming)
    if at_once:
        _wait_for(on_their_way)
    return every


def _offsets(counts: Sequence[int]) -> list[int]:
    """Where each begins that lies after those before it."""
    return [0, *itertools.accumulate(counts)][:-1]


def _long_first(tensors: Sequence[Tensor]) -> list[int]:
    """What is short is computed while what is long is on its way."""
    return sorted(range(len(tensors)), key=lambda index: -len(tensors[index]))


def _others_first(rank: int, world: int) -> list[int]:
    """Ranks, from the next one on: no two ranks begin with the same."""
    return [(rank + step) % world for step in range(1, world + 1)]


def _wait_for(on_their_way: dict[int, _Slices]) -> None:
    """What nothing has read: it has come when ranks meet for the next message, and the one after takes its place."""
    for slices in on_their_way.values():
        for _, wait in slices.parts:
            wait()
    on_their_way.clear()


def _multiply(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    products = list(zip(weights, biases, strict=True))
    slices = slices_on_their_way().pop(x.data_ptr(), None)
    if slices is None:
        return [F.linear(x, *product) for product in products]
    parts, widest = x.chunk(len(slices.parts)), max(map(len, weights))
    # What is narrow beside others need not go in parts: more products cost more than they hide.
    early = [2 * len(weight) >= widest for weight in weights]
    outputs = [x.new_empty(len(x), len(weight)) for weight in weights]
    *others, (rank, own_is_there) = slices.parts
    for peer, wait in ((rank, None), *others):
        if wait is not None:
            wait()
        for product, output, now in zip(products, outputs, early, strict=True):
            if now:
                _multiply_into(output.chunk(len(parts))[peer], slices.own if peer == rank else parts[peer], *product)
    own_is_there()  # for those that read all of it
    for product, output, done in zip(products, outputs, early, strict=True):
        if not done:
            _multiply_into(output, x, *product)
    return outputs


def _multiply_into(output: Tensor, x: Tensor, weight: Tensor, added: Tensor | None) -> None:
    if added is None:
        torch.mm(x, weight.t(), out=output)
    else:
        torch.addmm(added, x, weight.t(), out=output)


def _multiply_and_scatter(
    tensors: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor | None],
    world: int,
    group: str,
    version: str,
) -> list[Tensor]:
    """What a bias is added to is each row [out], or it is one of each row [rows, out] (`overlap.SplitProducts`)."""
    first = tensors[0]
    shapes = [(world, len(x) // world, len(weight)) for x, weight in zip(tensors, weights, strict=True)]
    counts = [*map(math.prod, shapes)]
    memory = take_place(sum(counts) * first.element_size(), first.device, group)
    process_group = dist.distributed_c10d._resolve_process_group(group)
    if memory is None:
        _wait_for(slices_on_their_way())
        answers = []
        for x, weight, bias, shape in zip(tensors, weights, biases, shapes, strict=True):
            y, into = x.new_empty(2, *shape)
            _multiply_into(y.flatten(0, 1), x, weight, bias)
            dist.all_to_all_single(into, y, group=process_group)
            answers.append(sum_parts(into))
        return answers
    rank, offsets, sent, waits = process_group.rank(), _offsets(counts), [], []
    received = [
        memory.get_buffer(rank, shape, first.dtype, offset) for shape, offset in zip(shapes, offsets, strict=True)
    ]
    for index in _long_first(tensors):
        (_, count, width), weight, bias = shapes[index], weights[index], biases[index]
        if count < SHORT:  # laid here for all, who fetch it
            _multiply_into(received[index].flatten(0, 1), tensors[index], weight, bias)
            continue
        parts = tensors[index].chunk(world)
        added = bias.chunk(world) if bias is not None and bias.ndim == 2 else [bias] * world
        for peer in _others_first(rank, world)[:-1]:
            sent.append(first.new_empty(count, width))
            _multiply_into(sent[-1], parts[peer], weight, added[peer])
            theirs = memory.get_buffer(peer, (count, width), first.dtype, offsets[index] + rank * count * width)
            waits.append(copy_beside([(theirs, sent[-1])], first.device))
        _multiply_into(received[index][rank], parts[rank], weight, added[rank])
    for wait in waits:
        wait()
    _wait_for(slices_on_their_way())
    meet(memory, group, first.device)
    for index, (_, count, width) in enumerate(shapes):
        if count < SHORT:
            offset = offsets[index] + rank * count * width
            theirs = [memory.get_buffer(peer, (count, width), first.dtype, offset) for peer in range(world)]
            received[index] = torch.stack(theirs)
    return [sum_parts(x) for x in received]


for _device in ("CUDA", "CPU"):
    _library.impl("gather_slices", _gather_slices, _device)
    _library.impl("multiply", _multiply, _device)
    _library.impl("multiply_and_scatter", _multiply_and_scatter, _device)


@torch.library.register_fake("diffusers_rocm::gather_slices", lib=_library)
def _(slices, world, group, at_once, version):
    return [x.new_empty(world * x.shape[0], *x.shape[1:]) for x in slices]


@torch.library.register_fake("diffusers_rocm::multiply", lib=_library)
def _(x, weights, biases):
    return [x.new_empty(x.shape[0], weight.shape[0]) for weight in weights]


@torch.library.register_fake("diffusers_rocm::multiply_and_scatter", lib=_library)
def _(tensors, weights, biases, world, group, version):
    return [x.new_empty(x.shape[0] // world, weight.shape[0]) for x, weight in zip(tensors, weights, strict=True)]


@functools.cache
def teach_compiler() -> bool:
    """Messages keep the order that the model has them in, on all ranks, though the compiler could order them anew."""
    from torch._inductor.lowering import fallback_handler, register_lowering
    from torch._inductor.virtualized import V

    last: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def keep_in_order(operation: torch._ops.OpOverload) -> None:
        fall_back = fallback_handler(operation, add_to_fallback_set=False)

        @register_lowering(operation, type_promotion_kind=None)
        def lower(*args: Any) -> Any:
            first = len(V.graph.operations)
            made = fall_back(*args)
            for each in V.graph.operations[first:]:
                if V.graph in last:
                    V.graph.additional_buffer_deps[each.get_operation_name()].add(last[V.graph])
            last[V.graph] = V.graph.operations[first].get_outputs()[0].get_name()
            return made

    for operation in (_ours.gather_slices.default, _ours.multiply_and_scatter.default):
        keep_in_order(operation)
    return True


def gather_slices(slices: Sequence[Tensor], axis: Axis) -> list[Tensor]:
    """Slices of tokens [B, n, ...] of all ranks, in their order: [B, axis.size x n, ...] each, in one message.

    In a graph, of one item, they are on their way: `multiply` alone may read them.
    """
    batch = slices[0].shape[0]
    # Several items are put in order, which reads them.
    every = _ours.gather_slices(
        [x.flatten(0, 1) for x in slices], axis.size, axis.group.group_name, at_once=batch != 1, version=_VERSION
    )
    return [_items_first(x, batch, axis.size) for x in every]


def multiply(x: Tensor, linears: Sequence[nn.Linear]) -> list[Tensor]:
    """Products of tokens [B, S, in], which may be on their way."""
    outputs = _ours.multiply(x.flatten(0, 1), [each.weight for each in linears], [each.bias for each in linears])
    return [output.unflatten(0, x.shape[:2]) for output in outputs]


def multiply_and_scatter(tensors: Sequence[Tensor], linears: Sequence[nn.Linear], axis: Axis) -> list[Tensor]:
    """Sums over all ranks of products of tokens [B, axis.size x n, in]: this rank's slice [B, n, out] of each."""
    batch = tensors[0].shape[0]
    ranks_first = [
        x.flatten(0, 1) if batch == 1 else x.unflatten(1, (axis.size, -1)).transpose(0, 1).flatten(0, 2)
        for x in tensors
    ]
    weights, biases = [each.weight for each in linears], [each.bias for each in linears]
    sums = _ours.multiply_and_scatter(ranks_first, weights, biases, axis.size, axis.group.group_name, _VERSION)
    return [x.unflatten(0, (batch, -1)) for x in sums]


def _items_first(x: Tensor, batch: int, world: int) -> Tensor:
    return x.unflatten(0, (world, batch, -1)).transpose(0, 1).flatten(1, 2)
