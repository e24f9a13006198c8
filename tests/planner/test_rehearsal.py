"""A rehearsal counts what a rank does, and what it will hold."""

import json
import unittest
from collections import Counter
from pathlib import Path
from unittest import mock

import torch
from parameterized import parameterized

from diffusers_rocm import ParallelConfig
from diffusers_rocm.benchmarks.collective_calls import collective_calls
from diffusers_rocm.benchmarks.known_models import KNOWN_MODELS, build, inputs
from diffusers_rocm.distributed import choices
from diffusers_rocm.distributed.axis import Axis
from diffusers_rocm.distributed.collectives import all_gather_int64
from diffusers_rocm.hooks import step_graph
from diffusers_rocm.planner import rehearsal
from diffusers_rocm.planner.rehearsal import Ledger, ranks_that_are_not_there, rehearse
from diffusers_rocm.planner.search import denoise_bytes

from ..testing_utils import run_ranks


FLUX = KNOWN_MODELS["flux"]
RUNS = Path(__file__).parents[2] / "docs" / "benchmarks"
TINY = {
    "flux": {
        "num_layers": 2,
        "num_single_layers": 2,
        "num_attention_heads": 5,
        "attention_head_dim": 16,
        "joint_attention_dim": 24,
        "pooled_projection_dim": 12,
        "axes_dims_rope": [4, 6, 6],
    },
    "wan": {"num_layers": 2, "num_attention_heads": 5, "attention_head_dim": 12, "ffn_dim": 70, "text_dim": 24},
}


def total(ledger: Ledger, kind: str, what: str = "flops") -> int:
    return sum(count * getattr(work, what) for work, count in ledger.work.items() if work.kind == kind)


def sent(ledger: Ledger) -> dict[str, tuple[int, int]]:
    """Kind -> how often, and bytes of all."""
    found: dict[str, tuple[int, int]] = {}
    for each, count in ledger.exchanges.items():
        calls, size = found.get(each.kind, (0, 0))
        found[each.kind] = calls + count, size + count * each.sent
    return found


def tiny_size(name: str):
    return KNOWN_MODELS[name].sized(80, 5 if name == "wan" else None, 7)


def exchanges_of_a_rank(name: str, degrees: dict[str, int], rotate_method: str) -> tuple[dict, int]:
    """Of a real forward: kind -> calls; bytes of the model's weights."""
    known, size = KNOWN_MODELS[name], tiny_size(name)
    model = build(known, TINY[name], torch.device("cpu"), torch.float32)
    given = inputs(known, size, model, torch.float32)
    model.enable_parallelism(config=ParallelConfig(**degrees, rotate_method=rotate_method))
    calls: Counter[str] = Counter()

    def count(name, sent, original, *args, **kwargs):
        calls[name] += 1
        return original(*args, **kwargs)

    with torch.no_grad(), collective_calls(count):
        model(**given)
    weights = [*model.parameters(), *model.buffers()]
    return dict(calls), sum(x.nbytes for x in weights)


class TestRehearsal(unittest.TestCase):
    def test_what_is_known_of_flux(self):
        """The floors that the literature has: 4608 tokens, 3072 wide, 57 blocks, 24 heads (docs/performance.md)."""
        tokens, wide = 4608, 3072
        one, tp, ulysses = (
            rehearse(FLUX, FLUX.size, degrees, {}, torch.bfloat16) for degrees in ({}, {"tp": 4}, {"ulysses": 4})
        )
        linears = 57 * 24 * tokens * wide**2
        assert linears <= total(one, "matmul") <= 1.01 * linears
        assert total(one, "attention") == 57 * 4 * tokens**2 * wide
        assert total(tp, "attention") * 4 == total(one, "attention") == total(ulysses, "attention") * 4
        assert sent(one) == {}
        # Four sums for each of 19 double blocks and one for each of 38 single ones, of all activations.
        sums = 2 * wide * (19 * 2 * tokens + 38 * tokens)
        assert sent(tp)["all-reduce"] == (114, sums)
        # One exchange before attention and one after, of which a quarter stays.
        calls, size = sent(ulysses)["all-to-all"]
        assert calls == 114 and size == 57 * 4 * 2 * wide * tokens // 4 * 3 // 4

    @parameterized.expand(
        [
            ("flux", {"tp": 3}, "p2p"),
            ("flux", {"ulysses": 2}, "p2p"),
            ("flux", {"ulysses": 3}, "p2p"),
            ("flux", {"ring": 3}, "p2p"),
            ("flux", {"ring": 2}, "allgather"),
            ("flux", {"ring": 2, "tp": 2}, "p2p"),
            ("wan", {"ulysses": 2}, "p2p"),
            ("wan", {"tp": 2}, "p2p"),
        ]
    )
    def test_a_real_rank_does_the_same(self, name, degrees, rotate_method):
        world = 1
        for size in degrees.values():
            world *= size
        known = KNOWN_MODELS[name]
        real, weights = run_ranks(world, exchanges_of_a_rank, name, degrees, rotate_method)[0]
        given = tiny_size(name), degrees, TINY[name], torch.float32, rotate_method
        ledger = rehearse(known, *given, slow_links=True, busy=choices.OF_CPU)
        counted = Counter()
        for each, count in ledger.exchanges.items():
            counted["all-to-all" if each.kind == "hop" else each.kind] += count
        assert real == counted and ledger.weights == weights, (real, counted)

    @parameterized.expand([({},), ({"ring": 2},), ({"tp": 2},)])
    def test_blocks_that_are_gone_through_once_count_for_all(self, degrees):
        given = FLUX, tiny_size("flux"), degrees, TINY["flux"], torch.float32
        short = rehearse(*given)
        with mock.patch.object(rehearsal, "_repeat_equal_blocks"):
            whole = rehearse(*given)
        assert short.exchanges == whole.exchanges and short.weights == whole.weights
        for kind in ("matmul", "attention"):
            assert total(short, kind) == total(whole, kind) > 0
        # The first block may have to copy what it is given, and fuses with what is before it, as others do not.
        for what in ("eager_bytes", "fused_bytes"):
            assert abs(total(short, "other", what) / total(whole, "other", what) - 1) < 0.05

    def test_memory_of_flux_as_measured(self):
        run = json.loads((RUNS / "memory_bf16_4xh200.json").read_text())
        measured = max(run["peaks"]["denoise"]["device"])
        ledger = rehearse(FLUX, FLUX.size, {"tp": 4}, {}, torch.bfloat16)
        assert abs(denoise_bytes(ledger, "bfloat16") / measured - 1) < 0.05
        run = json.loads((RUNS / "memory_int8_4xh200.json").read_text())
        measured = max(run["peaks"]["denoise"]["device"])
        assert abs(denoise_bytes(ledger, "int8") / measured - 1) < 0.08

    def test_as_a_real_model_it_refuses(self):
        for degrees, said in (
            ({"tp": 6}, "exceeds the 5"),
            ({"ulysses": 6}, "Ulysses over 6 ranks needs as many heads"),
        ):
            with self.assertRaisesRegex(ValueError, said):
                rehearse(FLUX, tiny_size("flux"), degrees, TINY["flux"], torch.float32)
        with self.assertRaisesRegex(ValueError, "cannot be had with"):
            rehearse(FLUX, FLUX.size, {}, {"number_of_layers": 2}, torch.float32)
        assert not torch.distributed.is_initialized()

    def test_hosts_of_ranks_that_are_not_there(self):
        """A graph's, on a GPU: they have no group of their own, and all say what the first says."""
        with ranks_that_are_not_there(4):
            axis = Axis("model", torch.distributed.group.WORLD, 0, 4, 0, torch.device("cuda", 0))
            hosts = step_graph.of_hosts(axis)
            assert all_gather_int64(torch.tensor([3, 5]), hosts).tolist() == [[3, 5]] * 4

    @parameterized.expand([True, False])
    def test_gpus_of_ranks_that_are_not_there(self, known):
        """Are of this one's kind, by which a rank by itself computes as it does beside others."""
        with ranks_that_are_not_there(2), mock.patch.object(rehearsal, "is_known", lambda device: known):
            model = build(FLUX, TINY["flux"] | {"num_attention_heads": 4}, torch.device("cpu"), torch.float32)
            model.enable_parallelism(config=ParallelConfig(ulysses=2))
            assert model.parallelism.axes.ulysses.known_gpus is known


if __name__ == "__main__":
    unittest.main()
