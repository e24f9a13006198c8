"""Products beside the copies of their input, or of their output, for tensor parallelism over slices of tokens.

Between products each rank has a slice of the tokens (Korthikanti et al., 2022, "Reducing activation recomputation in
large transformer models"). In a graph of a step the slices are fetched out of the other ranks' memory, and what has
come of one rank is multiplied while that of the next comes; and what is for one rank is laid in its memory while that
for the next is multiplied (Wang et al., 2023, "Overlap communication with dependent computation via decomposition").
No multiprocessor copies but what is short. Over slow links both go through the host's memory so, in 8 bits if that is
asked for. Without a graph they go by the process group.

Where messages are laid, and when ranks meet, is that of `peer_memory`, or of `host_memory`.
"""

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from . import host_memory
from .axis import Axis
from .beside import copy_beside
from .compression import EXACT, compress, compress_parts, compressed_size, decompress_into
from .host_memory import HostMemory
from .parts import sum_parts
from .peer_memory import meet, slices_on_their_way, take_place, version_of


# Fewer rows of a rank are not worth parts: products of so few would be slower than the message that they hide, which
# then goes by one kernel in place of several copies.
SHORT = 512

# Over slow links, where a message takes longer than the product beside it, so many parts at least, of few ranks too.
PARTS = 4


@dataclass(frozen=True)
class _Slices:
    """Rows of all ranks, on their way.

    Attributes:
        every: where they come to, which is kept until they have.
        own: this rank's, which are there.
        parts: rows, and what waits for them, in the order in which they come, this rank's last.
        slow: whether they take longer than what can be computed meanwhile.
    """

    every: Tensor
    own: Tensor
    parts: list[tuple[slice, Callable[[], None]]]
    slow: bool = False


_library = torch.library.Library("diffusers_rocm", "FRAGMENT")
_VERSION = version_of(__file__)
_library.define(
    "gather_slices(Tensor[] slices, int world, str group, bool lossy, bool at_once, str version) -> Tensor[]"
)
_library.define("multiply(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor[]")
_library.define(
    "multiply_and_scatter("
    "Tensor[] tensors, Tensor[] weights, Tensor?[] biases, int world, str group, bool lossy, str version) -> Tensor[]"
)
_ours = torch.ops.diffusers_rocm


def _gather_slices(
    slices: list[Tensor], world: int, group: str, lossy: bool, at_once: bool, version: str
) -> list[Tensor]:
    on_their_way, process_group = slices_on_their_way(), dist.distributed_c10d._resolve_process_group(group)
    every = [x.new_empty(world * len(x), *x.shape[1:]) for x in slices]
    memory = _place(sum(x.nbytes for x in slices), slices[0].device, group)
    _wait_for(on_their_way)
    host = host_memory.of_captured_call(group)
    if host is not None:
        coming = _gather_through_host(host, slices, every, lossy)
    elif memory is not None:
        coming = _gather_by_copies(memory, slices, every, process_group)
    else:
        coming = _gather_by_group(slices, every, process_group, lossy)
    on_their_way |= {each.every.data_ptr(): each for each in coming}
    if at_once:
        _wait_for(on_their_way)
    return every


def _place(size: int, device: torch.device, group: str) -> Any:
    """As `take_place`; where messages go through the host's memory there is none."""
    return None if host_memory.carries(group) else take_place(size, device, group)


def _gather_by_group(
    slices: list[Tensor], every: list[Tensor], group: dist.ProcessGroup, lossy: bool
) -> Iterator[_Slices]:
    for x, into in zip(slices, every, strict=True):
        parts = into.chunk(group.size())
        landing = [_landing(part, lossy) for part in parts]
        dist.all_gather(landing, _message(x, lossy), group=group)
        for message, part in zip(landing, parts, strict=True):
            _put(message, part, lossy)
        parts[group.rank()].copy_(x)
    return iter(())


def _gather_by_copies(
    memory: Any, slices: list[Tensor], every: list[Tensor], group: dist.ProcessGroup
) -> Iterator[_Slices]:
    rank, world, device, offsets = group.rank(), group.size(), slices[0].device, _offsets([x.numel() for x in slices])
    own = [memory.get_buffer(rank, x.shape, x.dtype, offset) for x, offset in zip(slices, offsets, strict=True)]
    for place, x in zip(own, slices, strict=True):
        place.copy_(x)
    meet(memory, group.group_name, device)
    for index in _long_first(slices):
        x, offset = slices[index], offsets[index]
        theirs = [memory.get_buffer(peer, x.shape, x.dtype, offset) for peer in range(world)]
        if len(x) < SHORT:
            torch.cat(theirs, out=every[index])
            continue
        coming = []
        for peer in _others_first(rank, world):
            rows = slice(peer * len(x), (peer + 1) * len(x))
            coming.append((rows, copy_beside([(every[index][rows], theirs[peer])], device)))
        yield _Slices(every[index], own[index], coming)


def _gather_through_host(
    host: HostMemory, slices: list[Tensor], every: list[Tensor], lossy: bool
) -> Iterator[_Slices]:
    for index in _long_first(slices):
        into, coming, begun, count = every[index], [], [], len(slices[index])
        of_rank = into.chunk(host.world)
        own = of_rank[host.rank]
        own.copy_(slices[index])  # and sent from there: the compiler may have other use for the slice
        for rows in _cuts(count, host.world):
            places = [each[rows] for each in of_rank]
            landing = [_landing(place, lossy) for place in places]
            landing[host.rank] = landing[host.rank][:0]
            begun.append(host.begin(_message(own[rows], lossy), landing))
            for peer in host.sources:
                arrive = functools.partial(_arrive, begun[-1], peer, landing[peer], places[peer], lossy)
                coming.append((slice(peer * count + rows.start, peer * count + rows.stop), arrive))
        rows_of_own = slice(host.rank * count, (host.rank + 1) * count)
        yield _Slices(into, own, [*coming, (rows_of_own, functools.partial(_each, begun))], slow=True)


def _cuts(rows: int, world: int) -> list[slice]:
    """Into which parts the rows of a rank are cut, as even as can be."""
    count = max(1, min(-(-PARTS // world), rows // SHORT))
    return [slice(rows * index // count, rows * (index + 1) // count) for index in range(count)]


def _each(waits: Sequence[Callable[[], None]]) -> None:
    for wait in waits:
        wait()


def _arrive(wait: Callable[[int], None], peer: int, landing: Tensor, x: Tensor, lossy: bool) -> None:
    wait(peer)
    _put(landing, x, lossy)


def _message(x: Tensor, lossy: bool) -> Tensor:
    """What is sent of `x`: [n]."""
    return compress(x.flatten()) if lossy else x.flatten()


def _landing(x: Tensor, lossy: bool) -> Tensor:
    """Where a message comes to that is to be put into `x`, contiguous: itself, if it is exact."""
    return x.new_empty(compressed_size(x.numel()), dtype=torch.uint8) if lossy else x.view(-1)


def _put(message: Tensor, x: Tensor, lossy: bool) -> None:
    if lossy:
        decompress_into(x, message)


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
        _each([wait for _, wait in slices.parts])
    on_their_way.clear()


def _multiply(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    products = list(zip(weights, biases, strict=True))
    slices = slices_on_their_way().pop(x.data_ptr(), None)
    if slices is not None and len(slices.own) < SHORT:
        _each([wait for _, wait in slices.parts])
        slices = None
    if slices is None:
        return [F.linear(x, *product) for product in products]
    widest = max(map(len, weights))
    # Where messages are short, what is narrow beside others need not go in parts: more products cost more than they
    # hide.
    early = [slices.slow or 2 * len(weight) >= widest for weight in weights]
    outputs = [x.new_empty(len(x), len(weight)) for weight in weights]
    *others, (own, own_is_there) = slices.parts
    for rows, wait in ((own, None), *others):
        if wait is not None:
            wait()
        for product, output, now in zip(products, outputs, early, strict=True):
            if now:
                _multiply_into(output[rows], x[rows] if wait is not None else slices.own, *product)
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
    lossy: bool,
    version: str,
) -> list[Tensor]:
    """What a bias is added to is each row [out], or it is one of each row [rows, out] (`overlap.SplitProducts`)."""
    products = list(zip(tensors, weights, biases, strict=True))
    size = sum(len(x) * len(weight) for x, weight, _ in products) * tensors[0].element_size()
    memory, host = _place(size, tensors[0].device, group), host_memory.of_captured_call(group)
    process_group = dist.distributed_c10d._resolve_process_group(group)
    if host is not None:
        received = _scatter_through_host(host, products, lossy)
    elif memory is not None:
        received = _scatter_by_copies(memory, products, process_group)
    else:
        received = _scatter_by_group(products, process_group, lossy)
    return [sum_parts(x) for x in received]


_Product = tuple[Tensor, Tensor, Tensor | None]


def _of_rows(product: _Product, rows: slice) -> _Product:
    x, weight, bias = product
    return x[rows], weight, bias[rows] if bias is not None and bias.ndim == 2 else bias


def _scatter_by_group(products: list[_Product], group: dist.ProcessGroup, lossy: bool) -> list[Tensor]:
    _wait_for(slices_on_their_way())
    answers = []
    for x, weight, bias in products:
        made = x.new_empty(group.size(), len(x) // group.size(), len(weight))
        _multiply_into(made.flatten(0, 1), x, weight, bias)
        sent = compress_parts(made.flatten(), [made[0].numel()] * len(made)) if lossy else made
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        answers.append(torch.empty_like(made) if lossy else received)
        for message, part in zip(received.chunk(len(made)), answers[-1], strict=True):
            _put(message, part, lossy)
        answers[-1][group.rank()] = made[group.rank()]  # which is not rounded
    return answers


def _scatter_by_copies(memory: Any, products: list[_Product], group: dist.ProcessGroup) -> list[Tensor]:
    rank, world, first = group.rank(), group.size(), products[0][0]
    shapes = [(world, len(x) // world, len(weight)) for x, weight, _ in products]
    offsets, sent, waits = _offsets([*map(math.prod, shapes)]), [], []
    received = [
        memory.get_buffer(rank, shape, first.dtype, offset) for shape, offset in zip(shapes, offsets, strict=True)
    ]
    for index in _long_first([x for x, *_ in products]):
        _, count, width = shapes[index]
        if count < SHORT:  # laid here for all, who fetch it
            _multiply_into(received[index].flatten(0, 1), *products[index])
            continue
        parts = [_of_rows(products[index], slice(peer * count, (peer + 1) * count)) for peer in range(world)]
        for peer in _others_first(rank, world)[:-1]:
            sent.append(first.new_empty(count, width))
            _multiply_into(sent[-1], *parts[peer])
            theirs = memory.get_buffer(peer, (count, width), first.dtype, offsets[index] + rank * count * width)
            waits.append(copy_beside([(theirs, sent[-1])], first.device))
        _multiply_into(received[index][rank], *parts[rank])
    for wait in waits:
        wait()
    _wait_for(slices_on_their_way())
    meet(memory, group.group_name, first.device)
    for index, (_, count, width) in enumerate(shapes):
        if count < SHORT:
            offset = offsets[index] + rank * count * width
            theirs = [memory.get_buffer(peer, (count, width), first.dtype, offset) for peer in range(world)]
            received[index] = torch.stack(theirs)
    return received


def _scatter_through_host(host: HostMemory, products: list[_Product], lossy: bool) -> list[Tensor]:
    rank, world, received, sent, arrivals = host.rank, host.world, {}, [], []
    for index in _long_first([x for x, *_ in products]):
        x, weight, _ = products[index]
        count = len(x) // world
        made, into = x.new_empty(2, world, count, len(weight))
        received[index] = into
        if count < SHORT:
            _multiply_into(made.flatten(0, 1), *products[index])
        for rows in _cuts(count, world):
            landing = [_landing(place[rows], lossy) for place in into]
            wait = host.receive(landing, for_all=False)
            arrivals += [functools.partial(_arrive, wait, i, landing[i], into[i, rows], lossy) for i in host.sources]
            for peer in host.targets:
                if count >= SHORT:
                    start = peer * count
                    part = _of_rows(products[index], slice(start + rows.start, start + rows.stop))
                    _multiply_into(made[peer, rows], *part)
                sent.append(_message(made[peer, rows], lossy))
                host.send(sent[-1], peer)
        if count < SHORT:
            into[rank] = made[rank]
        else:
            _multiply_into(into[rank], *_of_rows(products[index], slice(rank * count, (rank + 1) * count)))
    sending = host.sent()
    _each(arrivals)
    sending()
    _wait_for(slices_on_their_way())
    return [received[index] for index in range(len(products))]


for _device in ("CUDA", "CPU"):
    _library.impl("gather_slices", _gather_slices, _device)
    _library.impl("multiply", _multiply, _device)
    _library.impl("multiply_and_scatter", _multiply_and_scatter, _device)


@torch.library.register_fake("diffusers_rocm::gather_slices", lib=_library)
def _(slices, world, group, lossy, at_once, version):
    return [x.new_empty(world * x.shape[0], *x.shape[1:]) for x in slices]


@torch.library.register_fake("diffusers_rocm::multiply", lib=_library)
def _(x, weights, biases):
    return [x.new_empty(x.shape[0], weight.shape[0]) for weight in weights]


@torch.library.register_fake("diffusers_rocm::multiply_and_scatter", lib=_library)
def _(tensors, weights, biases, world, group, lossy, version):
    return [x.new_empty(x.shape[0] // world, weight.shape[0]) for x, weight in zip(tensors, weights, strict=True)]


@functools.cache
def keep_messages_in_order() -> bool:
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
    every = _ours.gather_slices([x.flatten(0, 1) for x in slices], *_sent_so(axis), batch != 1, _VERSION)
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
    sums = _ours.multiply_and_scatter(ranks_first, weights, biases, *_sent_so(axis), _VERSION)
    return [x.unflatten(0, (batch, -1)) for x in sums]


def _sent_so(axis: Axis) -> tuple[int, str, bool]:
    """How many ranks there are, their group, and whether messages are in 8 bits."""
    return axis.size, axis.group.group_name, axis.communication != EXACT


def _items_first(x: Tensor, batch: int, world: int) -> Tensor:
    return x.unflatten(0, (world, batch, -1)).transpose(0, 1).flatten(1, 2)
