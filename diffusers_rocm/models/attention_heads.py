"""Ulysses (Jacobs et al., 2023): tokens of this rank with all heads for all tokens with this rank's heads, and back.

Messages are laid out tokens first, [S, B, H, D], so that parts of any length are joined by lying one after another:
what arrives is used through a view, without a copy. Over slow links long sequences go a group of heads at a time: the
next group is on its way while the one that is there computes.

In 8 bits queries go as they are, in a message of their own: where one is rounded all of its scores move together, and
the answer with them, while what is rounded of keys and values is averaged (docs/numerics.md).
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed.axis import Axis
from ..distributed.beside import begin_exchange
from ..distributed.choices import begins_early
from ..distributed.collectives import exchange_in_group, joined, needs_grad, start_exchange
from ..distributed.compression import EXACT, compress_parts, compressed_size, decompress_parts
from ..distributed.sharding import Block
from .attention_kernels import KERNELS


P, R = ParamSpec("P"), TypeVar("R")


def remembered(function: Callable[P, R]) -> Callable[P, R]:
    """What depends on sizes alone, computed once: each attention of a step asks again, and eagerly the host is late.

    The compiler traces `function` itself, whose answer is a constant there; it warns of `functools.cache`.
    """
    known = functools.lru_cache(maxsize=1024)(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs) if torch.compiler.is_compiling() else known(*args, **kwargs)

    return call


# Of one rank: its query heads, and the key heads that they attend with.
Share = tuple[slice, slice]


class Cut(NamedTuple):
    """What is sent of a tensor.

    Attributes:
        x: [B, S, H, D].
        heads: that each rank has.
        exact: whether it goes as it is, where others are in 8 bits.
    """

    x: Tensor
    heads: tuple[slice, ...]
    exact: bool


def tokens_first(*tensors: Tensor) -> Tensor:
    """[B, S, H, D] each to one [S, B, sum of H, D]."""
    return torch.cat([x.transpose(0, 1) for x in tensors], dim=2)


def for_queries(x: Tensor, heads: int) -> Tensor:
    """Keys or values [B, S, Hk, D] as [B, S, heads, D]."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)


@remembered
def _shares(heads: int, key_heads: int, world: int, group: int = 0, groups: int = 1) -> tuple[Share, ...]:
    """Of every rank, those of its heads that are in the group, all by default."""
    each, shares = heads // key_heads, []
    for rank in range(world):
        first, last = Block(heads, 1).bounds(rank, world)
        start, stop = (first + bound for bound in Block(last - first, 1).bounds(group, groups))
        shares.append((slice(start, stop), slice(start // each, -(-stop // each))))
    return tuple(shares)


def _counts(*of: slice) -> list[int]:
    return [each.stop - each.start for each in of]


def _cuts(q: Tensor, k: Tensor, v: Tensor, shares: Sequence[Share]) -> list[Cut]:
    (queries, keys), exact = zip(*shares, strict=True), needs_grad(q, k, v)
    return [Cut(q, queries, exact=True), Cut(k, keys, exact), Cut(v, keys, exact)]


def _to_each(cuts: Sequence[Cut]) -> tuple[list[Tensor], int]:
    """One message of all cuts, to every rank its heads: the parts of it, and the dim that they are joined along."""
    world = len(cuts[0].heads)
    if all(cut.x.shape[2] % world == 0 for cut in cuts):  # one copy, not one for each rank
        by_rank = ((cut.x.unflatten(2, (world, -1)), cut.heads[0]) for cut in cuts)
        return [x[:, :, :, heads].permute(2, 1, 0, 3, 4) for x, heads in by_rank], 3
    return [tokens_first(*(cut.x[:, :, cut.heads[rank]] for cut in cuts)).flatten() for rank in range(world)], 0


def _from_each(received: Tensor, batch: int, size: int, counts: Sequence[int]) -> tuple[Tensor, ...]:
    """What came of each cut: [B, S, heads, D], of so many heads each."""
    return received.view(-1, batch, sum(counts), size).transpose(0, 1).split(list(counts), dim=2)


def _attended(q: Tensor, k: Tensor, v: Tensor, share: Share, each: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a share, as many heads of all, where a key head serves `each` query heads."""
    queries, keys = share
    if each > 1:
        wanted = slice(queries.start - keys.start * each, queries.stop - keys.start * each)
        k, v = (x.repeat_interleave(each, 2)[:, :, wanted] for x in (k, v))
    return q, k, v


def scatter_heads(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], axis: Axis
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of this rank with all heads -> tokens of the group, `lengths` by rank, with this rank's heads.

    Compiled, over slow links, values go first, which need no norm and no rotary embedding: they are on their way while
    queries and keys are made. Over fast links a message costs more than that hides (docs/performance.md).

    Raises:
        ValueError: fewer heads than ranks.
    """
    heads, key_heads = q.shape[2], k.shape[2]
    if heads < axis.size:
        raise ValueError(
            f"Ulysses over {axis.size} ranks needs as many heads, and this attention has {heads}; use "
            f"ulysses_degree <= {heads} and a ring for the rest"
        )
    shares = _shares(heads, key_heads, axis.size)
    cuts = _cuts(q, k, v, shares)
    if begins_early(axis):
        values, others = (_start_to_scatter(each, lengths, axis) for each in (cuts[2:], cuts[:2]))
        (v,), (q, k) = values(), others()
    else:
        q, k, v = _start_to_scatter(cuts, lengths, axis)()
    return _attended(q, k, v, shares[axis.rank], heads // key_heads)


def _start_to_scatter(cuts: Sequence[Cut], lengths: tuple[int, ...], axis: Axis) -> Callable[[], tuple[Tensor, ...]]:
    """Begin to send each rank its heads; what waits, and answers [B, S, heads, D] of each cut for this rank."""
    start = functools.partial(start_exchange, axis=axis)
    return _start_messages(cuts, lengths, axis.rank, axis.communication == EXACT, start)


def _start_messages(
    cuts: Sequence[Cut], lengths: Sequence[int], rank: int, exact: bool, start: Callable[..., Callable[[], Tensor]]
) -> Callable[[], tuple[Tensor, ...]]:
    """`_start_to_scatter`, in one message, or in 8 bits in two; `start` begins one, as `start_exchange` does."""
    batch, length, _, size = cuts[0].x.shape
    messages = [cuts] if exact else [[cut for cut in cuts if cut.exact is way] for way in (True, False)]
    coming = []
    for message in filter(None, messages):
        counts = [_counts(*(cut.heads[each] for cut in message)) for each in range(len(lengths))]
        send = tuple(length * batch * sum(each) * size for each in counts)
        receive = tuple(each * batch * sum(counts[rank]) * size for each in lengths)
        arrive = start(*_to_each(message), send, receive, exact=exact or message[0].exact)
        coming.append((arrive, counts[rank]))
    return lambda: tuple(x for arrive, counts in coming for x in _from_each(arrive(), batch, size, counts))


def gather_heads(out: Tensor, heads: int, lengths: tuple[int, ...], axis: Axis) -> Tensor:
    """Tokens of the group with this rank's heads -> tokens of this rank with all heads."""
    parts = _start_to_gather(out, _shares(heads, heads, axis.size), lengths, axis)()
    return torch.cat(parts, dim=2).transpose(0, 1)


def _start_to_gather(
    out: Tensor, shares: Sequence[Share], lengths: tuple[int, ...], axis: Axis
) -> Callable[[], list[Tensor]]:
    """Begin to send each rank its tokens; what waits, and answers [S, B, heads, D] of each rank's share."""
    batch, _, count, size = out.shape
    length = lengths[axis.rank]
    send = tuple(each * batch * count * size for each in lengths)
    receive = tuple(length * batch * each * size for each in _counts(*(queries for queries, _ in shares)))
    arrive = start_exchange([out.transpose(0, 1)], 0, send, receive, axis)
    return lambda: [part.view(length, batch, -1, size) for part in arrive().split(receive)]


def attention_in_halves(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    lengths: tuple[int, ...],
    axis: Axis,
) -> Tensor:
    """Ulysses half of the heads at a time, in compiled code, which puts what is computed beside what is on its way.

    All values go first, as in `scatter_heads`.

    Args:
        q: [B, S, H, D], this rank's tokens; k, v: [B, S, Hk, D].
        mask: None, or broadcastable to [B, heads of this rank, sum(lengths), sum(lengths)].
        attend: attention of some heads of this rank, of all tokens.
        lengths: tokens of every rank.
    """
    heads, key_heads, rank, back = q.shape[2], k.shape[2], axis.rank, []
    whole, *halves = (_shares(heads, key_heads, axis.size, *half) for half in ((0, 1), (0, 2), (1, 2)))
    values = _start_to_scatter(_cuts(q, k, v, whole)[2:], lengths, axis)
    others = [_start_to_scatter(_cuts(q, k, v, half)[:2], lengths, axis) for half in halves]
    (v,) = values()
    for half, arrive in zip(halves, others, strict=True):
        queries, keys = (_within(each, of_all) for each, of_all in zip(half[rank], whole[rank], strict=True))
        attended = _attended(*arrive(), v[:, :, keys], half[rank], heads // key_heads)
        out = attend(*attended, mask if mask is None or mask.shape[1] == 1 else mask[:, queries])
        back.append(_start_to_gather(out, half, lengths, axis))
    parts = zip(*(arrive() for arrive in back), strict=True)
    return torch.cat([part for of_rank in parts for part in of_rank], dim=2).transpose(0, 1)


def _within(heads: slice, of: slice) -> slice:
    return slice(heads.start - of.start, heads.stop - of.start)


def _in_groups(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    kernel: str,
    lengths: Sequence[int],
    rank: int,
    groups: int,
    group: str,
    exact: bool,
) -> Tensor:
    """Ulysses a group of heads at a time.

    While a group computes, the next one's queries, keys and values are on their way, and while the last one does, the
    outputs of all before it. Nothing hides the first group's coming and the last one's going.

    Args:
        q: [B, S, H, D]; k, v: [B, S, Hk, D]; this rank's tokens.
        mask: None, or broadcastable to [B, heads of this rank, sum(lengths), sum(lengths)].
        kernel, group: names of both.
        lengths: tokens of every rank.
        groups: at most as many as every rank has heads.
        exact: or in 8 bits.
    """
    world, (batch, length, heads, size) = len(lengths), q.shape
    process_group = dist.distributed_c10d._resolve_process_group(group)

    def send(
        x: Tensor, outgoing: Sequence[int], incoming: Sequence[int], beside: bool, exact: bool
    ) -> Callable[[], Tensor]:
        """Begin to, beside what is computed next, or now."""
        sizes = outgoing, incoming
        if not exact:
            x, sizes = compress_parts(x, outgoing), [[*map(compressed_size, counts)] for counts in sizes]
        if beside:
            arrive = begin_exchange(x, *sizes, process_group)
        else:
            received = exchange_in_group(x, *sizes, process_group)

            def arrive() -> Tensor:
                return received

        return arrive if exact else lambda: decompress_parts(arrive(), incoming, q.dtype)

    def send_group(index: int) -> Callable[[], tuple[Tensor, ...]]:
        def start(of: list[Tensor], dim: int, outgoing: tuple[int, ...], incoming: tuple[int, ...], exact: bool):
            return send(joined(of, dim), outgoing, incoming, index > 0, exact)

        return _start_messages(_cuts(q, k, v, parts[index]), lengths, rank, exact, start)

    def send_back(outs: list[Tensor], indices: range, beside: bool) -> tuple[Callable[[], Tensor], list[int]]:
        count = sum(out.shape[2] for out in outs)
        counts = [sum(parts[i][each][0].stop - parts[i][each][0].start for i in indices) for each in range(world)]
        incoming = [length * batch * each * size for each in counts]
        outgoing = [tokens * batch * count * size for tokens in lengths]
        return send(tokens_first(*outs).flatten(), outgoing, incoming, beside, exact), incoming

    parts = [_shares(heads, k.shape[2], world, index, groups) for index in range(groups)]
    whole, outs, back = _shares(heads, heads, world)[rank][0], [], []
    arrive = send_group(0)
    for index in range(groups):
        share, received = parts[index][rank], arrive()
        if index < groups - 1:
            arrive = send_group(index + 1)
        else:
            arrive = None  # it holds what came
            back.append(send_back(outs, range(index), beside=True))
            outs = []
        rows = mask if mask is None or mask.shape[1] == 1 else mask[:, _within(share[0], whole)]
        # No name for what the kernel takes, or answers, which would keep it beyond the next.
        outs.append(KERNELS[kernel](*_attended(*received, share, heads // k.shape[2]), rows, scale)[0])
    received = None
    back.append(send_back(outs, range(groups - 1, groups), beside=False))
    of_each = [[part.view(length, batch, -1, size) for part in arrive().split(incoming)] for arrive, incoming in back]
    return torch.cat([part for pair in zip(*of_each, strict=True) for part in pair], dim=2).transpose(0, 1)


_in_groups_op = torch.library.custom_op("diffusers_rocm::ulysses_in_groups", _in_groups, mutates_args=())


@_in_groups_op.register_fake
def _(q, *args):
    batch, length, heads, size = q.shape
    return q.new_empty((length, batch, heads, size)).transpose(0, 1)


def attention_in_groups(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, kernel: str, *where
) -> Tensor:
    """`_in_groups`, as one opaque operation for the compiler, which would move every message to the front."""
    return (_in_groups_op if torch.compiler.is_compiling() else _in_groups)(q, k, v, mask, scale, kernel, *where)
