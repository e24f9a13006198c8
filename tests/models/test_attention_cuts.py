"""How messages are cut: by the same on all ranks, also where these have unequal numbers of tokens."""

import unittest
from dataclasses import replace
from unittest.mock import patch

import torch
from parameterized import parameterized

from diffusers_rocm import ContextParallelConfig
from diffusers_rocm.distributed import choices
from diffusers_rocm.distributed.axis import Axis
from diffusers_rocm.distributed.choices import Busy
from diffusers_rocm.models import attention_parallel
from diffusers_rocm.models.attention_parallel import Layout, attention

from ..testing_utils import relative_l2, run_ranks
from .test_attention_dispatch import reference
from .test_attention_parallel import axes, choose, tensors


@torch.no_grad()
def asked_worker(ring: int, ulysses: int, rotate: str) -> list[tuple]:
    """By what a rank decides how messages are cut."""
    cp, ring_axis, ulysses_axis = axes(ring, ulysses)
    layout = Layout((25,), ring_axis, ulysses_axis)
    mine = [layout.take(x, 1, layout.rank) for x in tensors((25,), 6, 6, 1)]
    asked = []

    def noted(original):
        def call(*args):
            asked.append((original.__name__, *(each for each in args if isinstance(each, int)), original(*args)))
            return asked[-1][-1]

        return call

    names = "groups_of_heads", "hides_a_hop"
    with patch.multiple(attention_parallel, **{name: noted(getattr(attention_parallel, name)) for name in names}):
        attention(*mine, None, None, False, layout, cp, choose, rotate)
    return asked


@torch.no_grad()
def eight_bits_worker(ring: int, ulysses: int, rotate: str) -> tuple[float, int]:
    """Relative error on this rank's tokens, of which ranks have unequal numbers, of activations in 8 bits; and how
    often a ring rounds."""
    found = ContextParallelConfig(ring, ulysses, communication="int8").axes()
    layout = Layout((25,), found.ring, replace(found.ulysses, slow_links=True, known_gpus=True))
    q, k, v = tensors((25,), 6, 6, 1)
    mine = [layout.take(x, 1, layout.rank) for x in (q, k, v)]
    with patch.object(attention_parallel, "compress", wraps=attention_parallel.compress) as rounded:
        out = attention(*mine, None, None, False, layout, found.context, choose, rotate)
    return relative_l2(out, layout.take(reference(q, k, v, None)[0], 1, layout.rank)), rounded.call_count


class TestBusy(unittest.TestCase):
    @parameterized.expand([(2, 1, "p2p"), (3, 1, "allgather"), (1, 2, "p2p")])
    def test_all_ranks_ask_the_same(self, ring, ulysses, rotate):
        """Where lengths differ: what one of them cut, the other would wait for."""
        first, *others = run_ranks(ring * ulysses, asked_worker, ring, ulysses, rotate)
        assert first and others == [first] * len(others), (first, others)

    @parameterized.expand([(3, 1, "p2p"), (3, 1, "allgather"), (1, 3, "p2p"), (2, 2, "p2p")])
    def test_eight_bits_of_unequal_lengths(self, ring, ulysses, rotate):
        """Rounding is 0.007 of a message; the values of another token are most of it. A hop passes on what came."""
        for error, rounded in run_ranks(ring * ulysses, eight_bits_worker, ring, ulysses, rotate):
            assert 1e-4 < error < 0.03, error
            assert rotate == "allgather" or rounded == (ring > 1), rounded

    def test_small_heads_are_less_to_hide_a_hop_under(self):
        """4,429 tokens over two ranks: of SD3.5, 38 heads of 64, and were they of 128."""
        where = torch.device("cuda"), Axis.single("ring")
        with patch.object(choices, "_busy", lambda *_: Busy.of_gpu(132)):
            hops = [choices.hides_a_hop(38 * 2215, 2215, size, *where) for size in (64, 128)]
        assert hops == [False, True]

    def test_the_smallest_gpu_of_the_axis_decides(self):
        """And not the one of this process, which may be another card."""
        cuda, found = torch.device("cuda"), []
        for count in (60, 132):
            axis = replace(Axis.single("ring"), multiprocessors=count)
            groups = choices.groups_of_heads(24, 8448, cuda, axis)
            found.append((groups, choices.hides_a_hop(1 << 13, 100 << 7, 1 << 7, cuda, axis)))
        assert found == [(6, True), (3, False)]


if __name__ == "__main__":
    unittest.main()
