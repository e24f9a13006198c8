"""A ring whose hops are copies out of the other ranks' memory, of all that a message can be like."""

import tempfile
import unittest
from dataclasses import replace
from unittest.mock import patch

import torch
from parameterized import parameterized

from diffusers_rocm.distributed.graph_calls import call_of_a_graph, current_call
from diffusers_rocm.models.attention_parallel import Layout, attention

from ..distributed.peer_memory_on_a_cpu import MappedFiles, mapped_memory
from ..testing_utils import relative_l2, run_ranks
from .test_attention_dispatch import reference
from .test_attention_parallel import SHAPES, axes, choose, full_mask, tensors


@torch.no_grad()
def copies_worker(folder, streams, heads, key_heads, batch, kind) -> list[float]:
    """Errors of a ring of three that fetches by copies, before it is captured and in two captured calls, and without
    what the others have laid: the last is large."""
    cp, ring_axis, ulysses_axis = axes(3, 1)
    ring_axis = replace(ring_axis, slow_links=False, peer_memory=True)
    layout = Layout(streams, ring_axis, ulysses_axis)
    q, k, v = tensors(streams, heads, key_heads, batch)
    mask = None if kind is None else full_mask(kind, streams, heads, batch)
    expanded = [x.repeat_interleave(heads // key_heads, 2) for x in (k, v)]
    want = layout.take(reference(q, *expanded, mask)[0], 1, layout.rank)
    mine = [layout.take(x, 1, layout.rank) for x in (q, k, v)]

    def error() -> float:
        return relative_l2(attention(*mine, mask, None, False, layout, cp, choose), want)

    found = []
    with mapped_memory(folder):
        for captured in (False, True, True):
            with call_of_a_graph(captured):
                found.append(error())
                assert current_call().by_copies == captured
        own = layout.rank
        get_buffer = MappedFiles.get_buffer
        with (
            patch.object(MappedFiles, "get_buffer", lambda memory, rank, *args: get_buffer(memory, own, *args)),
            call_of_a_graph(True),
        ):
            found.append(error())
    return found


class TestByCopies(unittest.TestCase):
    @parameterized.expand([*((*shape, None) for shape in SHAPES), ((7, 18), 6, 6, 2, "rows"), (*SHAPES[2], "keys")])
    def test_hops(self, *message):
        with tempfile.TemporaryDirectory() as folder:
            for *errors, alone in run_ranks(3, copies_worker, folder, *message):
                assert max(errors) <= 1e-6 and alone > 0.1, (errors, alone)


if __name__ == "__main__":
    unittest.main()
