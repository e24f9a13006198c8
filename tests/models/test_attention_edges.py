"""Schedules where there is little to share, or numbers are extreme; over an axis of a mesh that another made."""

import itertools
import unittest

import torch
import torch.distributed as dist
from parameterized import parameterized
from torch.distributed.device_mesh import init_device_mesh

from diffusers_rocm import ContextParallelConfig
from diffusers_rocm.models.attention_parallel import Layout, attention

from ..testing_utils import message_of, relative_l2, run_ranks
from .test_attention_dispatch import reference
from .test_attention_parallel import axes, choose, method, tensors


def two_dimensional_mesh_worker() -> bool:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ulysses"))
    axes = ContextParallelConfig(mesh=mesh).axes()
    cp, ring, ulysses = axes.context, axes.ring, axes.ulysses
    return (cp.size, ring.size, ulysses.size) == (2, 1, 2) and cp.rank == dist.get_rank() % 2


@torch.no_grad()
def edge_worker(ring: int, ulysses: int) -> dict:
    """What few tokens, autocast and rows of one number come to."""
    cp, ring_axis, ulysses_axis = axes(ring, ulysses)
    results, world = {}, ring * ulysses

    def run(streams, mask=None, causal=False, rotate="p2p", heads=(4, 4), dtype=torch.float32):
        layout = Layout(streams, ring_axis, ulysses_axis)
        whole = tensors(streams, *heads, 1, dtype)
        mine = [layout.take(x, 1, layout.rank) for x in whole]
        return attention(*mine, mask, None, causal, layout, cp, choose, rotate), layout, whole

    if ulysses > 1:
        results["one token"] = [message_of(run, (tokens,), causal=True) for tokens in (world, 2 * world - 1)]
        results["one token, keys"] = message_of(run, (world,), torch.ones(1, 1, 1, world, dtype=torch.bool))
    else:
        out, layout, whole = run((world,), causal=True)
        results["few"] = relative_l2(out, layout.take(reference(*whole, full_causal(world))[0], 1, layout.rank))
    results["heads"] = message_of(run, (4 * world,), heads=(6, 4))
    for rotate in ("p2p", "allgather"):
        # A ring's rounding does not depend on the row; that of one kernel, so of Ulysses alone, does.
        for row, dtype in itertools.product((-1e4, -1e7, -1e9), (torch.float32, torch.float64)):
            if dtype == torch.float32 and (ring == 1 or row == -1e9):
                continue
            mask = torch.randn(1, 1, 12 * world, 12 * world, dtype=dtype, generator=torch.Generator().manual_seed(3))
            mask[..., ::3, :] = row
            out, layout, whole = run((12 * world,), mask, rotate=rotate, dtype=dtype)
            want = reference(*(x.double() for x in whole), mask.double())[0]
            results[f"{rotate}, {row}, {dtype}"] = relative_l2(out, layout.take(want, 1, layout.rank))
        mask = torch.rand(1, 4, 12 * world, 12 * world, generator=torch.Generator().manual_seed(4)) > 0.5
        out, layout, (q, k, v) = run((12 * world,), mask, rotate=rotate, heads=(4, 2))
        want = reference(q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2), mask)[0]
        results[f"{rotate}, a mask for each head, fewer of keys"] = relative_l2(out, layout.take(want, 1, layout.rank))
        with torch.autocast("cpu", torch.bfloat16), method(rotate)[0]:
            layout = Layout((24,), ring_axis, ulysses_axis)
            q, k, v = (layout.take(x, 1, layout.rank) for x in tensors((24,), 4, 4, 1))
            out = attention(q, k, v.bfloat16(), None, None, False, layout, cp, choose, rotate)
        want = layout.take(reference(*tensors((24,), 4, 4, 1), None)[0], 1, layout.rank)
        results[f"{rotate}, autocast"] = relative_l2(out, want) if out.dtype == torch.bfloat16 else torch.inf
    return results


def full_causal(length: int) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()[None, None]


class TestEdges(unittest.TestCase):
    @parameterized.expand([(2, 1), (3, 1), (1, 2), (2, 2)])
    def test_edges(self, ring, ulysses):
        for results in run_ranks(ring * ulysses, edge_worker, ring, ulysses):
            for name, result in results.items():
                if isinstance(result, float):
                    bar = 1e-2 if "autocast" in name else 1e-7 if "float64" in name else 1e-6
                    assert result <= bar, (name, result)
            for message in results.get("one token", []) + [results.get("one token, keys", "needs two on each")]:
                assert "needs two on each" in message, message
            assert results["heads"] == "6 heads of queries are no multiple of the 4 heads of keys"


class TestMesh(unittest.TestCase):
    def test_an_axis_of_a_larger_mesh(self):
        assert all(run_ranks(4, two_dimensional_mesh_worker))
