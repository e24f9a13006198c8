"""Attention over a sequence whose tokens lie on several ranks: ring, Ulysses and their product, over any kernel.

A rank holds [B, S, H, D] for its own tokens. Ulysses (Jacobs et al., 2023) trades the split of the sequence for a
split of the heads with one all-to-all, and back with another. Ring attention (Liu et al., 2023) keeps the queries and
passes keys and values from rank to rank; the outputs over the parts are merged by their log-sum-exp. In the product
(Fang and Zhao, 2024) Ulysses is inside. `attention_heads` has what Ulysses sends.

Schedules know nothing of backends. Nothing has to be divisible; all sizes follow from the global lengths.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..distributed.axis import Axis
from ..distributed.beside import pass_on, send_to_all
from ..distributed.choices import begins_early, goes_in_groups, goes_in_halves, groups_of_heads, hides_a_hop
from ..distributed.collectives import all_gather, copy_to_axis, gather_from_axis, needs_grad, start_gather_tokens
from ..distributed.compression import EXACT, compress, compressed_size, decompress, decompress_parts
from ..distributed.peer_memory import lay_for_all
from ..distributed.sharding import Block
from .attention_heads import (
    attention_in_groups,
    attention_in_halves,
    for_queries,
    gather_heads,
    remembered,
    scatter_heads,
    tokens_first,
)
from .attention_kernels import KERNELS, Kernel
from .attention_merge import merge


# Chooses a kernel for `q` [B, S, H, D] and a mask, and for whether the log-sum-exp is needed.
KernelChoice = Callable[[Tensor, Tensor | None, bool], Kernel]


@remembered
def _lengths(streams: tuple[int, ...], world: int) -> tuple[int, ...]:
    bounds = ([Block(length, 1).bounds(rank, world) for length in streams] for rank in range(world))
    return tuple(sum(stop - start for start, stop in each) for each in bounds)


@dataclass(frozen=True)
class Layout:
    """Which tokens of the global sequence each rank holds.

    Attributes:
        streams: global lengths of the parts (text, image) that attention joins, in the model's order; each is cut
            into near-equal runs, so that rank r's tokens are its run of every stream, one after another.
        ring: the outer axis.
        ulysses: the inner axis; rank r of the whole is ring rank `r // ulysses.size`.
    """

    streams: tuple[int, ...]
    ring: Axis
    ulysses: Axis

    @property
    def world(self) -> int:
        return self.ring.size * self.ulysses.size

    @property
    def rank(self) -> int:
        return self.ring.rank * self.ulysses.size + self.ulysses.rank

    def runs(self, rank: int) -> list[tuple[int, int]]:
        """`(start, stop)` of the rank's tokens in the model's global order, a run of each stream."""
        runs, offset = [], 0
        for length in self.streams:
            start, stop = Block(length, 1).bounds(rank, self.world)
            runs.append((offset + start, offset + stop))
            offset += length
        return runs

    def lengths(self) -> tuple[int, ...]:
        """Tokens of every rank."""
        return _lengths(self.streams, self.world)

    def group_lengths(self, ring_rank: int) -> tuple[int, ...]:
        """Tokens of the ranks of one Ulysses group."""
        inner = self.ulysses.size
        return self.lengths()[ring_rank * inner : (ring_rank + 1) * inner]

    def ring_lengths(self) -> tuple[int, ...]:
        """Tokens of every Ulysses group."""
        return tuple(sum(self.group_lengths(rank)) for rank in range(self.ring.size))

    def take(self, x: Tensor, dim: int, rank: int) -> Tensor:
        """The rank's tokens of `x`, which is in the model's global order along `dim`."""
        runs = [x.narrow(dim, start, stop - start) for start, stop in self.runs(rank)]
        return runs[0] if len(runs) == 1 else torch.cat(runs, dim)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    is_causal: bool,
    layout: Layout,
    cp: Axis,
    choose: KernelChoice,
    rotate_method: str = "p2p",
) -> Tensor:
    """Exact attention of this rank's queries to the keys of all ranks.

    Args:
        q: [B, S, H, D], this rank's tokens; k, v: [B, S, Hk, D], Hk a divisor of H.
        mask: boolean (True: attend) or additive, for this rank's keys (broadcast over queries) or for all keys in the
            model's order; [B, Sk], or broadcastable to [B, H, Sq, Sk] where Sq may be 1, this rank's queries or all.
        scale: 1 / sqrt(D) if None.
        is_causal: attend to earlier tokens of the model's order only.
        layout: where the tokens are.
        cp: both axes of the layout as one.
        choose: the kernel to use.
        rotate_method: how keys and values go round under the computation. "p2p" passes parts of the sequence on and
            holds two of them; "allgather" gathers some heads at a time, and holds three such groups. Short sequences,
            which hide nothing, are gathered at once, and so are those with gradients.

    Returns:
        [B, S, H, D]

    Raises:
        ValueError: a mask of another shape, or one with Ulysses where some rank has a single token; heads that are no
            multiple of the key heads; a kernel without log-sum-exp in a ring by "p2p".
    """
    if torch.is_autocast_enabled(q.device.type):  # as torch's own attention does
        narrow = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x if x.dtype == torch.float64 else x.to(narrow) for x in (q, k, v))
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} heads of queries are no multiple of the {k.shape[2]} heads of keys")
    if (is_causal or mask is not None) and layout.ulysses.size > 1 and min(layout.lengths()) <= 1:
        # A row for it would look like one for all.
        raise ValueError(
            f"{sum(layout.streams)} tokens over {layout.world} ranks leave some fewer than two, and Ulysses with a "
            "mask needs two on each: use fewer ranks"
        )
    if is_causal:
        causal = _causal_mask(layout, q.device)
        mask = causal if mask is None else _combine(_spread_mask(mask, q, k, layout, cp), causal)
    elif mask is not None:
        mask = _spread_mask(mask, q, k, layout, cp)
    if layout.ulysses.size == 1:
        return _attention_over_ring(q, k, v, mask, scale, layout, choose, rotate_method)
    heads, axis, lengths = q.shape[2], layout.ulysses, layout.group_lengths(layout.ring.rank)
    mask = _mask_of_group(mask, heads, layout)
    rows = sum(lengths) * q.shape[0]
    groups = groups_of_heads(heads // axis.size, rows, q.device, axis) if goes_in_groups(axis) else 1
    if groups > 1 and layout.ring.size == 1 and not needs_grad(q, k, v):
        kernel = choose(q, mask, False)
        if kernel.name in KERNELS:
            where = lengths, axis.rank, groups, axis.group.group_name, axis.communication == EXACT
            return attention_in_groups(q, k, v, mask, scale, kernel.name, *where)
    if goes_in_halves(heads, axis) and layout.ring.size == 1:

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            return choose(q, mask, False)(q, k, v, mask, scale)[0]

        return attention_in_halves(q, k, v, mask, attend, lengths, axis)
    q, k, v = scatter_heads(q, k, v, lengths, axis)
    return gather_heads(
        _attention_over_ring(q, k, v, mask, scale, layout, choose, rotate_method), heads, lengths, axis
    )


# ---- ring


def _attention_over_ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    layout: Layout,
    choose: KernelChoice,
    rotate_method: str,
) -> Tensor:
    ring = layout.ring
    if ring.size == 1:
        return choose(q, mask, False)(q, k, v, mask, scale)[0]
    lengths = layout.ring_lengths()
    kernel = choose(q, mask, rotate_method == "p2p")
    rows = max(lengths) * q.shape[0] * q.shape[2]
    groups = groups_of_heads(k.shape[2], rows // k.shape[2], q.device, ring)
    hides = hides_a_hop(rows, max(lengths), q.shape[3], q.device, ring) if rotate_method == "p2p" else groups > 1
    whole_only = kernel.name not in KERNELS or not kernel.gives_lse  # which "p2p" was not given
    if needs_grad(q, k, v) or not hides or whole_only:
        out, _ = kernel(q, *_keys_of_all(q, k, v, lengths, ring), mask, scale)
        return out
    # One opaque operation for the compiler: it would move every hop to the front, where nothing hides it.
    compiling, name, group = torch.compiler.is_compiling(), kernel.name, ring.group.group_name
    if mask is not None and mask.is_floating_point():
        q, mask = _lift(q, mask)
    if rotate_method == "p2p":
        run, exact = _ring_op if compiling else _ring, ring.communication == EXACT
        return run(q, k, v, mask, scale, name, lengths, ring.rank, group, exact, ring.peer_memory)
    run = _gathered_op if compiling else _gathered
    return run(q, k, v, mask, scale, name, lengths, ring.rank, groups, group, ring.communication == EXACT)


def attention_of_whole_queries(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, layout: Layout, cp: Axis, choose: KernelChoice
) -> Tensor:
    """Exact attention of queries that every rank has, the same, to the keys of all ranks; the same on every rank.

    The outputs over each rank's keys are exchanged, of which there are few where queries are (audio that listens to
    video), and merged by their log-sum-exp. With gradients keys and values are gathered.

    Args: q [B, S, H, D]; k, v [B, Sk, Hk, D], this rank's. Returns [B, S, H, D].
    """
    if needs_grad(q, k, v):
        message = copy_to_axis(gather_from_axis(tokens_first(k, v), layout.lengths(), cp, 0), cp)
        out, _ = choose(q, None, False)(q, *_keys_of(message, q.shape[2]), None, scale)
        return out
    out, lse = choose(q, None, True)(q, k, v, None, scale)
    part = torch.cat([out.to(lse.dtype), lse[..., None]], dim=-1)
    parts = all_gather(part[None], (1,) * cp.size, cp, 0)
    weights = torch.softmax(parts[..., -1:], dim=0)
    return (parts[..., :-1] * weights).sum(dim=0).to(q.dtype)


def attention_after_whole_keys(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, layout: Layout, choose: KernelChoice
) -> Tensor:
    """Exact attention of this rank's queries to keys that every rank has, the same, and to those of all ranks.

    The keys of a ring are gathered: what every rank has, of a prompt or of earlier frames, is seldom less.

    Args: q [B, S, H, D]; k, v [B, whole + S, Hk, D], this rank's S last; mask for all keys, one row for all queries.
    Returns [B, S, H, D].
    """
    length, heads, whole = q.shape[1], q.shape[2], k.shape[1] - q.shape[1]
    if mask is not None and (mask.ndim != 4 or mask.shape[2] != 1 or mask.shape[3] != whole + sum(layout.streams)):
        raise ValueError(f"a mask {[*mask.shape]} is not one row for {whole} keys and those of {layout.streams}")
    (before_k, k), (before_v, v) = (x.split([whole, length], 1) for x in (k, v))
    if k.shape[2] != heads:
        before_k, before_v = (for_queries(x, heads) for x in (before_k, before_v))
    axis, of_group = layout.ulysses, layout.group_lengths(layout.ring.rank)
    if axis.size > 1:
        start, stop = Block(heads, 1).bounds(axis.rank, axis.size)
        before_k, before_v = (x[:, :, start:stop] for x in (before_k, before_v))
        q, k, v = scatter_heads(q, k, v, of_group, axis)
        mask = _mask_of_group(mask, heads, layout)
    if layout.ring.size > 1:
        k, v = _keys_of_all(q, k, v, layout.ring_lengths(), layout.ring)
    out, _ = choose(q, mask, False)(q, torch.cat([before_k, k], 1), torch.cat([before_v, v], 1), mask, scale)
    return gather_heads(out, heads, of_group, axis) if axis.size > 1 else out


def _keys_of_all(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], ring: Axis) -> tuple[Tensor, ...]:
    """Keys and values of all ranks, gathered at once, for the heads of `q`: [B, sum(lengths), H, D].

    Their gradients are summed. Views of one message; in compiled code over slow links of two: values, which need no
    norm and no rotary embedding, are on their way while keys are made.
    """
    heads = q.shape[2]

    def start(*tensors: Tensor) -> Callable[[], Tensor]:
        return start_gather_tokens([x.transpose(0, 1) for x in tensors], 2, lengths, ring, q, needs_grad(q, k, v))

    if not begins_early(ring):
        return _keys_of(copy_to_axis(start(k, v)(), ring), heads)
    values, keys = start(v), start(k)
    return tuple(for_queries(copy_to_axis(arrive(), ring).transpose(0, 1), heads) for arrive in (keys, values))


def _keys_of(message: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Keys and values [B, S, heads, D] of a message [S, B, 2 key heads, D]: views, unless key heads are fewer."""
    return tuple(for_queries(x, heads) for x in message.transpose(0, 1).chunk(2, dim=2))


def _ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    kernel: str,
    lengths: Sequence[int],
    rank: int,
    group: str,
    exact: bool,
    by_copies: bool,
) -> Tensor:
    """Each rank passes keys and values on to the next while it computes with those that it has.

    They travel as one message [S, B, 2 Hk, D]; a rank has the one that it computes with and the one that comes. The
    last hop is not made. By copies each is fetched from the rank whose it is.

    Args:
        q: [B, Sq, H, D]; k, v: [B, lengths[rank], Hk, D].
        mask: None, or broadcastable to [B, H, Sq, sum(lengths)].
        kernel, group: names of both.
        lengths: keys of every rank.
        exact: or in 8 bits, passed on as they came, so that they are rounded once.
        by_copies: in a graph, if ranks have room for it.
    """
    world, row, out, lse = len(lengths), 2 * k[:, 0].numel(), None, None
    keys = [x.transpose(0, 1) for x in (k, v)]
    laid = lay_for_all(keys, 2, row * max(lengths), group) if by_copies else None
    message, fetch = (torch.cat(keys, 2), None) if laid is None else laid
    sent = message.flatten() if exact else compress(message.flatten())
    for hop in range(world):
        owner, next_owner = (rank - hop) % world, (rank - hop - 1) % world
        count = row * lengths[next_owner]
        if hop < world - 1 and fetch is not None:
            arrive = fetch(next_owner, count)
        elif hop < world - 1:
            arrive = pass_on(sent, count if exact else compressed_size(count), rank, world, group)
        columns = None if mask is None else mask.narrow(-1, sum(lengths[:owner]), lengths[owner])
        # No name for keys and values, which would keep this message beyond the next.
        part, part_lse = KERNELS[kernel](q, *_keys_of(message, q.shape[2]), columns, scale)
        if hop == world - 1:
            message = sent = arrive = None  # they hold the last keys and values, and merging needs room
        into = q.new_empty(q.shape) if hop == world - 1 else None
        out, lse = (part, part_lse) if out is None else merge(out, lse, part, part_lse, into)
        if hop < world - 1:
            sent, shape = arrive(), (lengths[next_owner], *message.shape[1:])
            message = (sent if exact else decompress(sent, count, q.dtype)).view(shape)
    return out


def _gathered(
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
    """Each rank sends all others its keys and values, some heads at a time, while it computes with those before.

    With its own it computes first. Two groups of heads of the others' are on their way, and one is in use.

    Args:
        q: [B, Sq, H, D]; k, v: [B, lengths[rank], Hk, D].
        mask: None, or broadcastable to [B, H, Sq, sum(lengths)].
        kernel, group: names of both.
        lengths: keys of every rank.
        groups: of heads, at most Hk.
        exact: or in 8 bits.
    """
    repeats, start, stop = q.shape[2] // k.shape[2], sum(lengths[:rank]), sum(lengths[: rank + 1])
    bounds = [Block(k.shape[2], 1).bounds(index, groups) for index in range(groups)]
    own, others = mask, mask
    if mask is not None:
        own = mask[..., start:stop]
        others = torch.cat([mask[..., :start], mask[..., stop:]], -1)

    def begin(index: int) -> Callable[[], Tensor] | None:
        if index >= groups:
            return None
        message = tokens_first(*(x[:, :, slice(*bounds[index])] for x in (k, v)))
        incoming = [length * message[0].numel() for length in lengths]
        if exact:
            return send_to_all(message.flatten(), incoming, rank, group)
        sizes = [compressed_size(count) for count in incoming]
        arrive = send_to_all(compress(message.flatten()), sizes, rank, group)
        return lambda: decompress_parts(arrive(), incoming[:rank] + incoming[rank + 1 :], q.dtype)

    coming = [begin(0), begin(1)]
    out, lse = KERNELS[kernel](q, *(for_queries(x, q.shape[2]) for x in (k, v)), own, scale)
    merged = q.new_empty(q.shape)
    for index, (low, high) in enumerate(bounds):
        message = coming.pop(0)()
        coming.append(begin(index + 2))
        message = message.view(-1, q.shape[0], 2 * (high - low), q.shape[3])
        heads = slice(low * repeats, high * repeats)
        rows = others if others is None or others.shape[1] == 1 else others[:, heads]
        # No name for keys and values, which would keep this message beyond the next.
        part, part_lse = KERNELS[kernel](q[:, :, heads], *_keys_of(message, heads.stop - heads.start), rows, scale)
        merge(out[:, :, heads], lse[..., heads], part, part_lse, merged[:, :, heads])
    return merged


_ring_op = torch.library.custom_op("diffusers_rocm::ring_attention", _ring, mutates_args=())
_gathered_op = torch.library.custom_op("diffusers_rocm::gathered_attention", _gathered, mutates_args=())


@_ring_op.register_fake
@_gathered_op.register_fake
def _(q, *args):
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


# ---- masks


def _spread_mask(mask: Tensor, q: Tensor, k: Tensor, layout: Layout, cp: Axis) -> Tensor:
    """The model's mask as [B or 1, H or 1, this rank's queries or 1, all keys in rank order]."""
    batch, queries, keys, everything = q.shape[0], q.shape[1], k.shape[1], sum(layout.streams)
    if mask.ndim == 2 and mask.shape[0] == batch and mask.shape[1] in (keys, everything):
        mask = mask[:, None, None]
    mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
    for dim in (1, 2):  # of heads and queries, where it was expanded
        mask = mask.narrow(dim, 0, 1) if mask.stride(dim) == 0 else mask
    rows, columns = mask.shape[-2:]
    if rows == everything:
        mask = layout.take(mask, -2, layout.rank)
    elif rows not in (1, queries):
        raise ValueError(f"a mask of {rows} rows fits neither the {queries} queries of this rank nor all {everything}")
    if columns == everything:
        return torch.cat([layout.take(mask, -1, rank) for rank in range(layout.world)], -1)
    if columns == keys and mask.shape[-2] == 1:
        return _gather_mask(mask, layout.lengths(), cp, -1)
    raise ValueError(
        f"a mask of {mask.shape[-2]} x {columns} needs a column for each of the {everything} keys, or one row for the "
        f"{keys} keys of this rank; a processor that makes its mask of the tokens that it is given cannot be split"
    )


def _gather_mask(mask: Tensor, sizes: tuple[int, ...], axis: Axis, dim: int) -> Tensor:
    # No backend gathers booleans as they are.
    as_sent = mask.to(torch.uint8) if mask.dtype == torch.bool else mask
    return all_gather(as_sent, sizes, axis, dim).to(mask.dtype)


def _mask_of_group(mask: Tensor | None, heads: int, layout: Layout) -> Tensor | None:
    """The mask for the queries of this rank's Ulysses group, and for its heads."""
    axis = layout.ulysses
    if mask is not None and mask.shape[2] > 1:
        mask = _gather_mask(mask, layout.group_lengths(layout.ring.rank), axis, -2)
    if mask is not None and mask.shape[1] > 1:
        start, stop = Block(heads, 1).bounds(axis.rank, axis.size)
        mask = mask[:, start:stop]
    return mask


def _causal_mask(layout: Layout, device: torch.device) -> Tensor:
    """[1, 1, this rank's queries, all keys in rank order]"""
    position = torch.arange(sum(layout.streams), device=device)
    keys = torch.cat([layout.take(position, 0, rank) for rank in range(layout.world)])
    return (keys[None] <= layout.take(position, 0, layout.rank)[:, None])[None, None]


def _lift(q: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of an additive mask that have nothing but very negative numbers, raised to zero: softmax does not change.

    In the log-sum-exp, by which parts are merged, the number of keys would drown in them. Where they are so large that
    the numbers beside them are 32 apart, the scores drown as well, in one process too: every key has the same weight.
    """
    top = mask.amax(-1, keepdim=True)
    finite = ~top.isinf()
    drowns = -32 / torch.finfo(torch.promote_types(q.dtype, torch.float32)).eps
    q = q.masked_fill(((top <= drowns) & finite).transpose(1, 2), 0)
    return q, mask - torch.where((top < -1e3) & finite, top, 0)


def _combine(mask: Tensor, causal: Tensor) -> Tensor:
    return mask & causal if mask.dtype == torch.bool else mask.masked_fill(~causal, -torch.inf)
