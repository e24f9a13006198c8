"""The collectives that the package uses, each in a form that works eagerly, compiled, and on any backend.

Eager code calls `torch.distributed` in place: no wrapper tensor, no extra copy. Under `torch.compile` the functional
collectives are called, which the compiler traces and schedules without a graph break.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from .axis import Axis
from .beside import begin_compiled_gather, begin_exchange
from .choices import begins_early, goes_by_gather
from .compression import (
    EXACT,
    RECORD,
    compress,
    compress_parts,
    compressed_size,
    decompress,
    decompress_parts,
)
from .graph_calls import come_to
from .host_memory import carries, of_captured_call
from .peer_memory import exchange_by_copies, gather_by_copies


# torch 2.13 renamed it
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_reduce(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sum of `x` (any shape, contiguous) over the axis. Eagerly `x` itself is overwritten."""
    if axis.size == 1:
        return x
    if torch.compiler.is_compiling():
        return funcol.all_reduce(x, "sum", axis.group)
    dist.all_reduce(x, group=axis.group)
    return x


def _sum_compressed(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sum of `x` (any shape) over the axis, in 8 bits: parts to the rank that sums them in float32, then the sums.

    Two ranks send each other all of it, which is as many bytes, in one message.
    """
    count = x.numel()
    if axis.size == 2:
        records = all_gather_stacked(compress(x.flatten()), axis)
        first, second = (decompress(each, count, torch.float32) for each in records)
        return (first + second).to(x.dtype).view(x.shape)
    each = -(-count // (axis.size * RECORD)) * RECORD
    flat = torch.nn.functional.pad(x.flatten(), (0, axis.size * each - count))
    sizes = (compressed_size(each),) * axis.size
    received = _start_exchange(compress(flat), sizes, sizes, axis)()
    parts = decompress(received, axis.size * each, torch.float32).view(axis.size, each)
    parts[axis.rank] = flat[axis.rank * each : (axis.rank + 1) * each]  # this rank's own was not rounded
    sums = all_gather_stacked(compress(parts.sum(0)), axis).flatten()
    return decompress(sums, count, x.dtype).view(x.shape)


def all_gather_stacked(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """`x` [...] of every rank, of one shape on all: [axis.size, ...]."""
    return _start_gather(x, axis)()


def _start_gather(x: torch.Tensor, axis: Axis) -> Callable[[], torch.Tensor]:
    x = x.contiguous()[None]
    if begins_early(axis):
        return begin_compiled_gather(x, axis.group)
    if torch.compiler.is_compiling():
        stacked = funcol.all_gather_tensor(x, 0, axis.group)
        return lambda: stacked
    memory = of_captured_call(axis.group.group_name)
    if memory is not None:
        return come_to(*memory.gather(x))
    stacked = x.new_empty((axis.size, *x.shape[1:]))
    _all_gather(stacked, x, group=axis.group)
    return lambda: stacked


def all_gather(x: torch.Tensor, sizes: tuple[int, ...], axis: Axis, dim: int = -1) -> torch.Tensor:
    """Concatenate `x`, of `sizes[rank]` along `dim`, of all ranks: `sum(sizes)` along `dim`.

    The sizes may differ by rank: shorter slices are padded for the exchange, which no backend does unevenly.
    """
    return _start_all_gather(x, sizes, axis, dim)()


def _start_all_gather(x: torch.Tensor, sizes: tuple[int, ...], axis: Axis, dim: int) -> Callable[[], torch.Tensor]:
    if axis.size == 1:
        return lambda: x
    dim %= x.ndim
    padding = (0, 0) * (x.ndim - dim - 1) + (0, max(sizes) - x.shape[dim])
    gather = _start_gather(torch.nn.functional.pad(x, padding) if padding[-1] else x, axis)

    def arrive() -> torch.Tensor:
        stacked = gather()
        if dim == 0 and min(sizes) == max(sizes):
            return stacked.flatten(0, 1)
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(stacked, sizes, strict=True)], dim)

    return arrive


def _start_exchange(
    x: torch.Tensor, send: tuple[int, ...], receive: tuple[int, ...], axis: Axis
) -> Callable[[], torch.Tensor]:
    """`start_exchange`, exact, by the process group."""
    own, other, name = axis.rank, 1 - axis.rank, axis.group.group_name
    copied = carries(name) if torch.compiler.is_compiling() else of_captured_call(name) is not None
    if not copied and goes_by_gather(axis) and send[other] == receive[other]:
        parts = x.split(send)
        gather = _start_gather(parts[other], axis)

        def arrive() -> torch.Tensor:
            of_both = gather()
            return torch.cat([parts[own] if rank == own else of_both[rank] for rank in range(2)])

        return arrive
    if begins_early(axis):
        return begin_exchange(x, send, receive, axis.group)
    received = exchange_in_group(x, send, receive, axis.group)
    return lambda: received


def exchange_in_group(
    x: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """An all-to-all, exact and without gradients, in a process group."""
    if torch.compiler.is_compiling():
        return funcol.all_to_all_single(x, list(receive), list(send), group)
    if of_captured_call(group.group_name) is not None:
        return begin_exchange(x, send, receive, group)()
    received = x.new_empty(sum(receive))
    dist.all_to_all_single(received, x, list(receive), list(send), group=group)
    return received


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.axis), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        return all_reduce(x.clone(memory_format=torch.contiguous_format), axis)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return all_reduce(x.clone(memory_format=torch.contiguous_format), axis)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.axis), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, sizes: tuple[int, ...], axis: Axis, dim: int) -> torch.Tensor:
        ctx.dim, ctx.start, ctx.length = dim, sum(sizes[: axis.rank]), sizes[axis.rank]
        return all_gather(x, sizes, axis, dim)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad.narrow(ctx.dim, ctx.start, ctx.length), None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, send: tuple[int, ...], receive: tuple[int, ...], axis: Axis) -> torch.Tensor:
        ctx.send, ctx.receive, ctx.axis = send, receive, axis
        return exchange_in_group(x, send, receive, axis.group)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return exchange_in_group(grad.contiguous(), ctx.receive, ctx.send, ctx.axis.group), None, None, None


def as_sent(x: torch.Tensor) -> torch.Tensor:
    """`x`, contiguous, for a collective that moves bits: not every backend knows float8."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _broadcast(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    buffer = as_sent(x.detach().to(axis.device, copy=True, memory_format=torch.contiguous_format))
    if torch.compiler.is_compiling():
        buffer = funcol.broadcast(buffer, 0, axis.group)  # counts ranks within the group
    else:
        dist.broadcast(buffer, src=axis.first, group=axis.group)
    return buffer.view(x.dtype).to(x.device)


class _FromFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        return _broadcast(x, axis)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad, None


class _ShareGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.size = axis.size
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad / ctx.size, None


def needs_grad(*tensors: torch.Tensor) -> bool:
    """Will somebody ask for the gradients of any of them?"""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


# Elements of a sum below which 8 bits are not worth their launches: it is latency that small messages cost.
COMPRESSED_FROM = 1 << 16


def copy_to_axis(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """A replicated tensor enters a sharded region: identity; the gradients of the ranks are summed.

    This is `f` of Megatron-LM (Shoeybi et al., 2019, section 3); `reduce_from_axis` is its conjugate `g`.
    """
    return _Copy.apply(x, axis) if needs_grad(x) else x


def reduce_from_axis(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Partial sums leave a sharded region: their sum over the axis; the gradient passes as it is."""
    if needs_grad(x):
        return _Reduce.apply(x, axis)
    compressed = axis.communication != EXACT and x.numel() >= COMPRESSED_FROM
    return _sum_compressed(x, axis) if compressed else all_reduce(x, axis)


def sum_over_axis(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Partial sums that stay inside a sharded region: summed over the axis, and so are their gradients."""
    return _Sum.apply(x, axis) if needs_grad(x) else all_reduce(x, axis)


def gather_from_axis(x: torch.Tensor, sizes: tuple[int, ...], axis: Axis, dim: int = -1) -> torch.Tensor:
    """Slices along `dim` leave a sharded region: all of them; each rank takes its slice of the gradient."""
    return _Gather.apply(x, sizes, axis, dim) if needs_grad(x) else all_gather(x, sizes, axis, dim)


def start_gather_tokens(
    parts: list[torch.Tensor],
    dim: int,
    sizes: tuple[int, ...],
    axis: Axis,
    later: torch.Tensor | None = None,
    exact: bool = False,
) -> Callable[[], torch.Tensor]:
    """Begin to gather activations of all ranks, as `start_exchange` begins.

    Args:
        parts: [sizes[rank], ...] each, of one dtype; joined along `dim`, above 0.
        later: what is beside the message, as of `gather_by_copies`.
        exact: as they are, also where the axis sends in 8 bits.

    Returns:
        A function that waits, and answers the ranks', joined along dim 0.
    """
    exact = exact or axis.communication == EXACT
    plain = exact and not needs_grad(*parts)
    if axis.peer_memory and plain and min(sizes) == max(sizes):
        received = gather_by_copies(parts, dim, axis.size, axis.group, later)
        return lambda: received
    x = torch.cat(parts, dim)
    if needs_grad(x):
        gathered = _Gather.apply(x, sizes, axis, 0)
        return lambda: gathered
    if exact:
        return _start_all_gather(x, sizes, axis, 0)
    counts = [size * x.shape[1:].numel() for size in sizes]
    arrive = _start_all_gather(compress(x.flatten()), tuple(map(compressed_size, counts)), axis, 0)
    return lambda: decompress_parts(arrive(), counts, x.dtype).view(-1, *x.shape[1:])


def start_exchange(
    parts: list[torch.Tensor],
    dim: int,
    send: tuple[int, ...],
    receive: tuple[int, ...],
    axis: Axis,
    exact: bool = False,
) -> Callable[[], torch.Tensor]:
    """Begin an all-to-all of what is `joined`, which holds `send[i]` elements for each rank i.

    In compiled code over slow links others may begin before it has come.

    Args:
        exact: as it is, also where the axis sends in 8 bits.

    Returns:
        A function that waits, and answers [sum(receive)], in rank order.
    """
    trained, exact = needs_grad(*parts), exact or axis.communication == EXACT
    plain = not trained and exact and all(part.dtype == parts[0].dtype for part in parts)
    if axis.peer_memory and plain and all(size == send[0] for size in (*send, *receive)):
        received = exchange_by_copies(parts, dim, axis.size, axis.group)
        return lambda: received
    x = joined(parts, dim)
    if trained:
        received = _Exchange.apply(x, send, receive, axis)
        return lambda: received
    if exact:
        return _start_exchange(x, send, receive, axis)
    sizes = (tuple(map(compressed_size, counts)) for counts in (send, receive))
    arrive = _start_exchange(compress_parts(x, send), *sizes, axis)
    return lambda: decompress_parts(arrive(), receive, x.dtype)


def joined(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    """A message [n]: its parts, joined along `dim`."""
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim)).reshape(-1)


def share_gradient(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Identity whose gradient, equal on all ranks, becomes a part that the ranks can sum: the conjugate of a copy."""
    return _ShareGradient.apply(x, axis) if needs_grad(x) else x


def broadcast_from_first(value: Any, axis: Axis) -> Any:
    """Make `value` the same on all ranks of the axis: everyone gets the first rank's.

    `value` is a tensor, or a list, tuple or dict of them; anything else is returned untouched. Structure, shapes and
    dtypes must agree between the ranks. What counts is the returned value: a tensor that has to move to the axis'
    device first is received into a buffer there, never into a temporary that is thrown away. Each rank's gradient
    passes to its own tensor.

    Returns:
        The value, each tensor on its own device, equal on all ranks.
    """
    if axis.size == 1:
        return value
    if isinstance(value, torch.Tensor):
        return _FromFirst.apply(value, axis) if needs_grad(value) else _broadcast(value, axis)
    if isinstance(value, dict):
        return {key: broadcast_from_first(item, axis) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [broadcast_from_first(item, axis) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def all_gather_int64(row: torch.Tensor, axis: Axis) -> torch.Tensor:
    """`row` [n] int64 of every rank: [axis.size, n], on the CPU."""
    if axis.size == 1:
        return row[None].cpu()
    return all_gather_stacked(row.to(axis.device), axis).cpu()


def on_all_ranks(own: bool, axis: Axis) -> bool:
    """Whether it is so on all ranks of the axis, who all ask."""
    return bool(all_gather_int64(torch.tensor([own]), axis).min())


def all_gather_text(text: str, axis: Axis) -> list[str]:
    """`text`, which may differ in length, of every rank."""
    data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=axis.device)
    sizes = tuple(all_gather_int64(torch.tensor([data.numel()]), axis).flatten().tolist())
    return [bytes(part.tolist()).decode() for part in all_gather(data, sizes, axis, 0).cpu().split(sizes)]
