"""Schedules over real ranks against one softmax over everything, and the merge that the ring rests on."""

import math
import time
import unittest
import weakref
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from parameterized import parameterized

from diffusers_rocm import ContextParallelConfig
from diffusers_rocm.distributed import choices, collectives
from diffusers_rocm.distributed.axis import Axis
from diffusers_rocm.distributed.choices import Busy
from diffusers_rocm.models import attention_heads, attention_parallel
from diffusers_rocm.models.attention_dispatch import choose_kernel
from diffusers_rocm.models.attention_kernels import KERNELS
from diffusers_rocm.models.attention_parallel import Layout, attention, attention_after_whole_keys

from ..testing_utils import relative_l2, run_ranks
from .test_attention_dispatch import reference


def choose(q, mask, needs_lse):
    return choose_kernel(q, mask)


def tensors(streams, heads, key_heads, batch, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    length = sum(streams)
    shapes = [(batch, length, count, 16) for count in (heads, key_heads, key_heads)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def full_mask(kind: str, streams, heads: int, batch: int):
    """A mask over the whole sequence; every row keeps a key."""
    length, generator = sum(streams), torch.Generator().manual_seed(1)
    shape = {
        "keys": (batch, 1, 1, length),
        "keys, 2 dims": (batch, length),
        "keys, one for the batch": (1, 1, 1, length),
        "keys, every head": (batch, heads, 1, length),
        "keys, additive": (batch, 1, 1, length),
        "keys, all of a rank": (batch, 1, 1, length),
        "rows": (1, 1, length, length),
        "rows, every head": (batch, heads, length, length),
        "rows, additive": (batch, 1, length, length),
        "rows of the least number": (1, 1, length, length),
    }[kind]
    if kind == "rows of the least number":
        mask = torch.zeros(shape)
        mask[..., ::5, :] = torch.finfo(torch.float32).min
        return mask
    if "additive" in kind:
        return torch.randn(shape, generator=generator)
    mask = torch.rand(shape, generator=generator) > 0.5
    mask[..., -1] = True
    if kind == "keys, all of a rank":
        mask[..., : length // 2] = False  # a whole part of the ring has nothing to say
    return mask


def method(rotate: str):
    """`(context, rotate_method)`: "at once" is an allgather, or Ulysses, of what is too little work to be cut."""
    busy = Busy(1 << 15, 1 << 40) if rotate == "at once" else choices.OF_CPU
    context = patch.object(choices, "OF_CPU", busy)
    return context, "allgather" if rotate == "at once" else rotate


def worker(ring, ulysses, streams, heads, key_heads, batch, rotate, kind, how, causal) -> float:
    """Relative error on this rank's tokens. `how` is what the rank gets of the mask: its keys, its rows, or all."""
    cp, ring_axis, ulysses_axis = axes(ring, ulysses)
    layout = Layout(streams, ring_axis, ulysses_axis)
    q, k, v = tensors(streams, heads, key_heads, batch)
    mask = None if kind is None else full_mask(kind, streams, heads, batch)
    expanded = [x.repeat_interleave(heads // key_heads, 2) for x in (k, v)]
    whole_mask = mask[:, None, None] if mask is not None and mask.ndim == 2 else mask
    if causal:
        triangle = torch.ones(sum(streams), sum(streams), dtype=torch.bool).tril()[None, None]
        if mask is None:
            whole_mask = triangle
        elif mask.dtype == torch.bool:
            whole_mask = whole_mask & triangle
        else:
            whole_mask = whole_mask.masked_fill(~triangle, -math.inf)
    want = layout.take(reference(q, *expanded, whole_mask)[0], 1, layout.rank)
    if mask is not None and how == "local":
        mask = layout.take(mask, -1, layout.rank)
    elif how == "rows":
        mask = layout.take(mask, -2, layout.rank)
    mine = [layout.take(x, 1, layout.rank) for x in (q, k, v)]
    context, rotate = method(rotate)
    with context:
        out = attention(*mine, mask, None, causal, layout, cp, choose, rotate)
    return relative_l2(out, want)


RINGS = [(ring, 1, rotate) for ring in (2, 3, 4) for rotate in ("p2p", "allgather", "at once")]
SPLITS = [*RINGS, (1, 2, "p2p"), (1, 3, "p2p"), (1, 4, "p2p"), (2, 2, "p2p"), (2, 2, "allgather")]
SPLITS += [(1, 2, "at once"), (1, 3, "at once")]
SHAPES = [((24,), 12, 12, 1), ((23,), 5, 5, 2), ((7, 18), 6, 3, 2)]  # even; uneven; joined, with fewer key heads
MASKS = [
    ("keys", "local"),
    ("keys", "global"),
    ("keys, 2 dims", "local"),
    ("keys, one for the batch", "local"),
    ("keys, every head", "local"),
    ("keys, additive", "local"),
    ("keys, all of a rank", "local"),
    ("rows", "global"),
    ("rows", "rows"),
    ("rows, every head", "global"),
    ("rows, additive", "rows"),
    ("rows of the least number", "rows"),
]
MASKED = [
    (2, 1, "p2p"),
    (3, 1, "p2p"),
    (2, 1, "at once"),
    (3, 1, "allgather"),
    (1, 3, "p2p"),
    (1, 3, "at once"),
    (2, 2, "p2p"),
]


class TestSchedules(unittest.TestCase):
    @parameterized.expand([(*split, *shape) for split in SPLITS for shape in SHAPES], skip_on_empty=False)
    def test_parity(self, ring, ulysses, rotate, streams, heads, key_heads, batch):
        for error in run_ranks(
            ring * ulysses, worker, ring, ulysses, streams, heads, key_heads, batch, rotate, None, "", False
        ):
            assert error <= 1e-6, error

    @parameterized.expand([(*split, *mask) for split in MASKED for mask in MASKS])
    def test_masks(self, ring, ulysses, rotate, kind, how):
        for error in run_ranks(ring * ulysses, worker, ring, ulysses, (7, 18), 6, 6, 2, rotate, kind, how, False):
            assert error <= 1e-6, error

    @parameterized.expand([(*split, kind) for split in MASKED for kind in (None, "keys", "keys, additive")])
    def test_causal(self, ring, ulysses, rotate, kind):
        for error in run_ranks(ring * ulysses, worker, ring, ulysses, (7, 18), 6, 6, 1, rotate, kind, "local", True):
            assert error <= 1e-6, error

    @parameterized.expand([(*split, kind) for split in MASKED for kind in (None, "rows")])
    def test_gradients(self, ring, ulysses, rotate, kind):
        for errors in run_ranks(ring * ulysses, gradient_worker, ring, ulysses, rotate, kind):
            assert len(errors) == 3 and max(errors) <= 1e-6, errors

    @parameterized.expand([(*split, kind) for split in MASKED for kind in (None, "keys")])
    def test_compiled_without_a_break(self, ring, ulysses, rotate, kind):
        for error in run_ranks(ring * ulysses, compiled_worker, ring, ulysses, rotate, kind):
            assert error <= 1e-6, error

    @parameterized.expand(
        [
            (2, 6, None, "exact"),
            (2, 6, "keys, every head", "exact"),
            (3, 6, "rows, every head", "exact"),
            (3, 4, None, "exact"),  # of which one rank would have no second half
            (2, 6, None, "int8"),
        ]
    )
    def test_compiled_in_halves(self, ulysses, heads, kind, communication):
        # Values, and of each half queries and keys, and what goes back; else all three, and what goes back. In 8 bits
        # queries go by themselves.
        wanted = (5 if heads >= 2 * ulysses else 3) + 2 * (communication == "int8")
        for error, sent in run_ranks(ulysses, halves_worker, ulysses, heads, kind, communication):
            assert error <= (1e-6 if communication == "exact" else 0.02), error
            assert sent == wanted, sent

    @parameterized.expand([("no lse",), ("no mask",), ("other direction",)])
    def test_wrong_twins_fail(self, twin):
        for ours, wrong in run_ranks(3, wrong_twin_worker, twin):
            assert ours <= 1e-6, ours
            assert not wrong <= 1e-2, wrong

    @parameterized.expand([("p2p",), ("allgather",)])
    def test_ring_holds_two_parts(self, rotate):
        for bytes_held, part in run_ranks(4, memory_worker, rotate):
            # Two parts; or three groups of a quarter of the heads, from three ranks.
            assert 0 < bytes_held <= (2 if rotate == "p2p" else 3 * 3 / 4) * part, (bytes_held, part)

    @parameterized.expand([(True,), (False,)])
    def test_ulysses_hides_messages_where_links_are_slow(self, slow):
        # 3 heads of each rank. What comes for the next is on its way while one computes; at last, what goes back.
        hidden = ["now", *["beside", "attention", "arrives"] * 2, "beside", "attention", "now", "arrives"]
        for events in run_ranks(2, order_worker, slow):
            assert events == (hidden if slow else ["attention"]), events

    def test_masks_that_fit_nothing(self):
        for message in run_ranks(2, bad_mask_worker):
            assert "a mask of 1 x 9 needs a column for each of the 25 keys" in message[0], message
            assert "a mask of 9 rows fits neither the" in message[1], message

    def test_too_few_heads(self):
        for message in run_ranks(3, few_heads_worker):
            assert "Ulysses over 3 ranks needs as many heads, and this attention has 2" in message


def whole_keys_worker(ring, ulysses, key_heads, kind) -> float:
    """Relative error of 23 queries to their own keys and to five before them that every rank has."""
    axes, whole, heads = ContextParallelConfig(ring, ulysses).axes(), 5, 6
    layout = Layout((23,), axes.ring, axes.ulysses)
    q, k, v = tensors((whole, 23), heads, key_heads, 2)
    mask = None if kind is None else full_mask(kind, (whole, 23), heads, 2)
    q, expanded = q[:, whole:], [x.repeat_interleave(heads // key_heads, 2) for x in (k, v)]
    want = layout.take(reference(q, *expanded, mask)[0], 1, layout.rank)
    mine = [torch.cat([x[:, :whole], layout.take(x[:, whole:], 1, layout.rank)], 1) for x in (k, v)]
    out = attention_after_whole_keys(layout.take(q, 1, layout.rank), *mine, mask, None, layout, choose)
    return relative_l2(out, want)


class TestKeysThatEveryRankHas(unittest.TestCase):
    @parameterized.expand([(1, 4), (3, 1), (2, 2)])
    def test_parity(self, ring, ulysses):
        for key_heads, kind in ((6, None), (2, "keys"), (3, "keys, every head"), (6, "keys, additive")):
            for error in run_ranks(ring * ulysses, whole_keys_worker, ring, ulysses, key_heads, kind):
                assert error <= 1e-6, (error, key_heads, kind)


def axes(ring, ulysses):
    axes = ContextParallelConfig(ring, ulysses).axes()
    return axes.context, *(replace(axis, slow_links=True, known_gpus=True) for axis in (axes.ring, axes.ulysses))


def gradient_worker(ring, ulysses, rotate, kind) -> list[float]:
    cp, ring_axis, ulysses_axis = axes(ring, ulysses)
    streams = (7, 18)
    layout = Layout(streams, ring_axis, ulysses_axis)
    whole = [x.double().requires_grad_() for x in tensors(streams, 6, 3, 2)]
    mask = None if kind is None else full_mask(kind, streams, 6, 2)
    weights = torch.arange(25 * 16.0).view(1, 25, 1, 16).double()
    q, k, v = whole
    out, _ = reference(q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2), mask)
    wanted = torch.autograd.grad((out * weights).sum(), whole)
    mine = [layout.take(x, 1, layout.rank).detach().requires_grad_() for x in whole]
    context, rotate = method(rotate)
    with context:
        out = attention(*mine, mask, None, False, layout, cp, choose, rotate)
    got = torch.autograd.grad((out * layout.take(weights, 1, layout.rank)).sum(), mine)
    return [relative_l2(g, layout.take(w, 1, layout.rank)) for g, w in zip(got, wanted, strict=True)]


@torch.no_grad()
def compiled_worker(ring, ulysses, rotate, kind) -> float:
    cp, ring_axis, ulysses_axis = axes(ring, ulysses)
    streams = (7, 18)
    layout = Layout(streams, ring_axis, ulysses_axis)
    mine = [layout.take(x, 1, layout.rank) for x in tensors(streams, 6, 3, 2)]
    mask = None if kind is None else layout.take(full_mask(kind, streams, 6, 2), -1, layout.rank)

    def step(q, k, v, mask):
        return attention(q, k, v, mask, None, False, layout, cp, choose, rotate) * 2

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    context, rotate = method(rotate)
    with context:
        return relative_l2(compiled(*mine, mask), step(*mine, mask))


@torch.no_grad()
def halves_worker(ulysses, heads, kind, communication) -> tuple[float, int]:
    """Relative error of a sequence too short for groups of heads, compiled, and how many messages it sends."""
    cp, ring_axis, ulysses_axis = axes(1, ulysses)
    streams, sent = (7, 18), 0
    layout = Layout(streams, ring_axis, replace(ulysses_axis, communication=communication))
    q, k, v = tensors(streams, heads, heads // 2, 2)
    mask = None if kind is None else full_mask(kind, streams, heads, 2)
    want = layout.take(reference(q, *(x.repeat_interleave(2, 2) for x in (k, v)), mask)[0], 1, layout.rank)

    def count(graph, inputs):
        nonlocal sent
        sent += len(graph.graph.find_nodes(op="call_function", target=torch.ops.diffusers_rocm.begin_all_to_all))
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend=count)
    mine, (context, _) = [layout.take(x, 1, layout.rank) for x in (q, k, v)], method("at once")
    with context, patch.object(collectives, "COMPRESSED_FROM", 1):
        out = compiled(*mine, mask, None, False, layout, cp, choose)
    return relative_l2(out, want), sent


@torch.no_grad()
def wrong_twin_worker(twin) -> tuple[float, float]:
    """Ours, and the same with one plausible mistake in the ring."""
    cp, ring_axis, ulysses_axis = axes(3, 1)
    streams = (7, 18)
    layout = Layout(streams, ring_axis, ulysses_axis)
    q, k, v = tensors(streams, 6, 6, 1)
    k[:, :10] *= 3  # parts of very different weight
    mask = full_mask("keys", streams, 6, 1)
    want = layout.take(reference(q, k, v, mask)[0], 1, layout.rank)
    mine = [layout.take(x, 1, layout.rank) for x in (q, k, v)]

    def error(mask=mask):
        return relative_l2(attention(*mine, mask, None, False, layout, cp, choose), want)

    ours = error()
    if twin == "no mask":
        return ours, error(None)
    if twin == "no lse":

        def mean(out, lse, part, part_lse, into):
            return out.add_(part).div_(2), lse

        with patch.object(attention_parallel, "merge", mean):
            return ours, error()
    # The parts arrive from the next rank in place of the previous one; sizes and masks say otherwise.
    even = Layout((9, 18), ring_axis, ulysses_axis)
    q, k, v = tensors((9, 18), 6, 6, 1)
    mask = full_mask("keys", (9, 18), 6, 1)
    want = even.take(reference(q, k, v, mask)[0], 1, even.rank)
    mine = [even.take(x, 1, even.rank) for x in (q, k, v)]

    def swapped(x, incoming, rank, world, group):
        send, receive = [0] * 3, [0] * 3
        send[(rank - 1) % 3], receive[(rank + 1) % 3] = x.numel(), incoming
        received = x.new_empty(incoming)
        dist.all_to_all_single(received, x, receive, send)
        return lambda: received

    with patch.object(attention_parallel, "pass_on", swapped):
        return ours, relative_l2(attention(*mine, mask, None, False, even, cp, choose), want)


@torch.no_grad()
def memory_worker(rotate) -> tuple[int, int]:
    """Most bytes of keys and values of a ring of 4 at a time, arrived or coming, and those of one part."""
    cp, ring_axis, ulysses_axis = axes(4, 1)
    layout = Layout((48,), ring_axis, ulysses_axis)
    mine = [layout.take(x, 1, layout.rank) for x in tensors((48,), 8, 8, 1)]
    name = "pass_on" if rotate == "p2p" else "send_to_all"
    held, most, coming, original = [], 0, 0, getattr(attention_parallel, name)

    def watched(x, incoming, *where):
        nonlocal most, coming
        arrive, count = original(x, incoming, *where), incoming
        if name == "send_to_all":
            count = sum(incoming) - incoming[layout.rank]
        coming += count

        def wait():
            nonlocal coming
            message = arrive()
            held.append(weakref.ref(message))
            coming -= count
            return message

        # What arrived, also what was kept of it by mistake, and what comes. Gloo's thread lets go a little late.
        time.sleep(0.1)
        alive = {message.data_ptr(): message.numel() for ref in held if (message := ref()) is not None}
        if name == "pass_on":
            alive[x.data_ptr()] = x.numel()
        most = max(most, (sum(alive.values()) + coming) * x.element_size())
        return wait

    context, rotate = method(rotate)
    with context, patch.object(attention_parallel, name, watched):
        attention(*mine, None, None, False, layout, cp, choose, rotate)
    return most, 2 * mine[1].numel() * mine[1].element_size()


@torch.no_grad()
def order_worker(slow: bool) -> list[str]:
    """What Ulysses of 2 ranks does, in its order, apart from messages that go at once."""
    cp, ring_axis, ulysses_axis = axes(1, 2)
    layout = Layout((48,), ring_axis, replace(ulysses_axis, slow_links=slow, known_gpus=True))
    mine = [layout.take(x, 1, layout.rank) for x in tensors((48,), 6, 6, 1)]
    events = []

    def noted(event, original):
        def call(*args, **kwargs):
            events.append(event)
            answer = original(*args, **kwargs)
            return noted("arrives", answer) if event == "beside" else answer

        return call

    kernel = KERNELS["flash_cpu"]
    watched = replace(kernel, run=noted("attention", kernel.run))
    with (
        patch.dict(KERNELS, flash_cpu=watched),
        patch.object(attention_heads, "begin_exchange", noted("beside", attention_heads.begin_exchange)),
        patch.object(attention_heads, "exchange_in_group", noted("now", attention_heads.exchange_in_group)),
    ):
        attention(*mine, None, None, False, layout, cp, choose)
    return events


@torch.no_grad()
def bad_mask_worker() -> list[str]:
    cp, ring_axis, ulysses_axis = axes(2, 1)
    layout = Layout((7, 18), ring_axis, ulysses_axis)
    mine = [layout.take(x, 1, layout.rank) for x in tensors((7, 18), 2, 2, 1)]
    messages = []
    for shape in ((1, 1, 1, 9), (1, 1, 9, 25)):
        with pytest.raises(ValueError) as raised:
            attention(*mine, torch.ones(shape, dtype=torch.bool), None, False, layout, cp, choose)
        messages.append(str(raised.value))
    return messages


@torch.no_grad()
def few_heads_worker() -> str:
    cp, ring_axis, ulysses_axis = axes(1, 3)
    layout = Layout((25,), ring_axis, ulysses_axis)
    mine = [layout.take(x, 1, layout.rank) for x in tensors((25,), 2, 2, 1)]
    with pytest.raises(ValueError) as raised:
        attention(*mine, None, None, False, layout, cp, choose)
    return str(raised.value)


class TestLayout(unittest.TestCase):
    @parameterized.expand([((24,), 2, 2), ((7, 18), 3, 1), ((5, 6, 11), 2, 3), ((4096, 512), 1, 5)])
    def test_the_ranks_share_the_sequence(self, streams, ring, ulysses):
        world = ring * ulysses
        layouts = []
        for rank in range(world):
            outer = Axis("ring", None, rank // ulysses, ring, 0, torch.device("cpu"))
            inner = Axis("ulysses", None, rank % ulysses, ulysses, 0, torch.device("cpu"))
            layouts.append(Layout(streams, outer, inner))
        order = torch.arange(sum(streams))
        taken = [layout.take(order, 0, layout.rank) for layout in layouts]
        assert torch.equal(torch.cat(taken).sort().values, order)
        assert [len(part) for part in taken] == list(layouts[0].lengths())
        assert max(layouts[0].lengths()) - min(layouts[0].lengths()) <= len(streams)
        grouped = [layouts[0].group_lengths(rank) for rank in range(ring)]
        assert sum(grouped, ()) == layouts[0].lengths()
