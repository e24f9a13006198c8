"""Merging attention over parts of the keys: torch's operations, and the kernel that stands in for them on a GPU."""

import importlib.util
import itertools
import math
import os
import sys
import unittest
from types import ModuleType
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parameterized import parameterized

from diffusers_rocm.models import attention_merge
from diffusers_rocm.models.attention_kernels import KERNELS
from diffusers_rocm.models.attention_merge import merge

from ..testing_utils import relative_l2
from .test_attention_dispatch import reference


class TestMerge(unittest.TestCase):
    @settings(max_examples=150, deadline=None)
    @given(
        data=st.data(),
        batch=st.integers(1, 2),
        heads=st.integers(1, 3),
        queries=st.integers(1, 6),
        keys=st.integers(1, 24),
        size=st.integers(1, 8),
        spread=st.sampled_from([0.1, 1.0, 30.0]),
        kept=st.floats(0.0, 1.0),
    )
    def test_any_chunking_equals_one_softmax(self, data, batch, heads, queries, keys, size, spread, kept):
        """Float64, to 1e-12; with any share of the keys masked, so that whole chunks and whole rows have none."""
        cuts = sorted(data.draw(st.sets(st.integers(1, max(keys - 1, 1)), max_size=6)))
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))

        def randn(length):
            return torch.randn(batch, length, heads, size, generator=generator, dtype=torch.float64)

        q, k, v = spread * randn(queries), randn(keys), randn(keys)
        mask = torch.rand(batch, heads, queries, keys, generator=generator) < kept
        bounds = [0, *[cut for cut in cuts if cut < keys], keys]
        out = lse = None
        for start, stop in zip(bounds, bounds[1:], strict=False):
            part = KERNELS["math"](q, k[:, start:stop], v[:, start:stop], mask[..., start:stop], None)
            if out is None:
                out, lse = part[0].clone(), part[1]
            else:
                out, lse = merge(out, lse, *part)
        want, want_lse = reference(q, k, v, mask)
        assert not out.isnan().any()
        assert (out - want).abs().max() <= 1e-12
        dead = want_lse == -math.inf
        assert torch.equal(lse == -math.inf, dead)
        assert ((lse - want_lse)[~dead].abs() <= 1e-12 * want_lse[~dead].abs().clamp(min=1)).all()

    def test_in_float32(self):
        """Many parts in bf16: what is merged is not rounded to it in between."""
        parts = [part(1, 9, 2, 16, seed, torch.bfloat16, False) for seed in range(8)]
        (out, lse), (want, want_lse) = parts[0], (x.double() for x in parts[0])
        for other, other_lse in parts[1:]:
            out, lse = merge(out, lse, other, other_lse)
            want, want_lse = merge(want, want_lse, other.double(), other_lse.double())
        assert out.dtype == lse.dtype == torch.float32 and relative_l2(out, want) <= 1e-6

    @parameterized.expand([("right", True), ("of the first part alone", False)])
    def test_a_kernel_is_tried_first(self, _, right):
        """Where it compiles to something else than torch's operations, it is not used."""

        def first_alone(out, lse, part, part_lse, into):
            into.copy_(out)
            return lse

        kernel = ModuleType("attention_merge_triton")
        kernel.merge_rows = attention_merge._merge_rows if right else first_alone
        there = mock.patch.object(importlib.util, "find_spec", return_value=True)
        with there, mock.patch.dict(sys.modules, {"diffusers_rocm.models.attention_merge_triton": kernel}):
            found = attention_merge._kernel_for.__wrapped__(torch.device("cpu"))
        assert found is (kernel.merge_rows if right else None)


def part(batch: int, length: int, heads: int, dim: int, seed: int, dtype: torch.dtype, heads_first: bool) -> tuple:
    """`(out, lse)` in one of the layouts that backends answer in, some rows without a key."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, length, dim) if heads_first else (batch, length, heads, dim)
    out = torch.randn(*shape, generator=generator).to(dtype)
    lse = 5 * torch.randn(shape[:3], generator=generator)
    dead = torch.rand(shape[:3], generator=generator) < 0.3
    out[dead], lse[dead] = 0, -math.inf
    return (out.transpose(1, 2), lse.transpose(1, 2)) if heads_first else (out, lse)


@unittest.skipUnless(
    importlib.util.find_spec("triton") and (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"),
    "needs triton, and a GPU or TRITON_INTERPRET=1",
)
class TestMergeKernel(unittest.TestCase):
    device = "cuda" if torch.cuda.is_available() else "cpu"

    @parameterized.expand(
        itertools.product(
            (torch.float32, torch.bfloat16),
            ((False, False), (True, True), (False, True)),
            (64, 40),
            ("new", "in place", "into"),
        )
    )
    def test_equals_torch(self, dtype, heads_first, dim, where):
        from diffusers_rocm.models.attention_merge_triton import merge_rows

        first, second = (part(2, 13, 3, dim, seed, dtype, heads_first[seed]) for seed in (0, 1))
        want, want_lse = merge(first[0].double(), first[1].double(), second[0].double(), second[1].double())
        out, lse, other, other_lse = (x.to(self.device) for x in (*first, *second))
        into = {"new": torch.empty(out.shape, device=self.device), "in place": out}.get(where)
        if into is None:  # some heads of a larger tensor
            into = torch.full((2, 13, 5, dim), math.nan, dtype=dtype, device=self.device)[:, :, 1:4]
        merged_lse = merge_rows(out, lse, other, other_lse, into)
        assert relative_l2(into.cpu(), want) <= (1e-6 if into.dtype == torch.float32 else 4e-3)
        dead = want_lse == -math.inf
        assert dead.any() and torch.equal(merged_lse.cpu() == -math.inf, dead)
        assert (into.cpu()[dead] == 0).all()
        assert (merged_lse.cpu()[~dead] - want_lse[~dead]).abs().max() <= 1e-5

    def test_is_taken(self):
        """What is tried first finds it right."""
        from diffusers_rocm.models.attention_merge_triton import merge_rows

        assert attention_merge._kernel_for(torch.device(self.device)) is merge_rows
