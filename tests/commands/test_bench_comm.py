"""`diffusers-rocm bench comm`: which collectives it finds in a step, and what it says of them."""

import subprocess
import sys
import unittest
from unittest import mock

import torch
from parameterized import parameterized

from diffusers_rocm.benchmarks import step
from diffusers_rocm.benchmarks.comm import IN_A_ROW, Collective, measure_comm

from ..testing_utils import run_ranks
from .test_bench_step import request
from .test_known_models import SMALL


def comm_worker(mesh: str) -> tuple[list[Collective], set[float]]:
    """As measured, and the microseconds of each where every measurement is 10 ms."""
    with mock.patch.object(step.Clock, "milliseconds", lambda *_: 10.0):
        same = {x for each in measure_comm(request(mesh)) for x in each.microseconds}
    return measure_comm(request(mesh)), same


def buffers_worker(blocks: int) -> int:
    """How many buffers are made for what a model of so many blocks sends."""
    with mock.patch.object(torch, "zeros_like", wraps=torch.zeros_like) as made:
        measure_comm(request("ulysses=2", config=SMALL["flux"] | {"num_single_layers": blocks}))
    return made.call_count


class TestBenchComm(unittest.TestCase):
    def test_comm_keeps_buffers_for_one_call_of_a_kind(self):
        assert run_ranks(2, buffers_worker, 1) == run_ranks(2, buffers_worker, 3)

    @parameterized.expand([("tp=2",), ("ulysses=2",)])
    def test_comm(self, mesh):
        for found, same in run_ranks(2, comm_worker, mesh):
            assert same == {10e3 / IN_A_ROW}
            calls = {"all-reduce": 0, "all-to-all": 0, "all-gather": 0}
            for each in found:
                calls[each.name] += each.calls
            # A double block has two products a stream that end in a sum, a single block one; attention, of two groups
            # of heads where links are slow, two exchanges for each.
            assert (calls["all-reduce"], calls["all-to-all"]) == ((6, 0) if mesh == "tp=2" else (0, 12)), calls
            assert all(each.median > 0 and len(each.microseconds) == len(each.sent) == 2 for each in found)
            image = 256 * 4 * 128 * 4  # bytes of the image's tokens, in float32
            sums = {size for each in found if each.name == "all-reduce" for size in each.sent}
            assert mesh != "tp=2" or sums == {image, image // 16, image + image // 16}, sums
            # Queries, keys, values and what comes of them: of half of all tokens, in three blocks, half goes.
            given = sum(each.calls * each.sent[0] for each in found if each.name == "all-to-all")
            assert mesh == "tp=2" or given == 3 * 4 * (image + image // 16) // 4, given

    def test_comm_of_what_cannot_be_had(self):
        config = [f"{name}={value}" for name, value in {**SMALL["flux"], "num_attention_heads": 1}.items()]
        command = [sys.executable, "-m", "diffusers_rocm", "bench", "comm", "--device", "cpu", "--mesh", "ulysses=2"]
        run = subprocess.run(
            [*command, "--resolution", "64", "--config", *config], capture_output=True, text=True, timeout=240
        )
        assert run.returncode == 1 and "Traceback" not in run.stderr, run.stderr
        assert run.stderr.splitlines()[-1].startswith("diffusers-rocm: Ulysses over 2 ranks needs as many heads"), run


if __name__ == "__main__":
    unittest.main()
