"""`diffusers-rocm bench comm`: which collectives it finds in a step, and what it says of them."""

import unittest
import weakref
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from typing import Any
from unittest import mock

import torch
from parameterized import parameterized

from diffusers_rocm import commands
from diffusers_rocm.benchmarks import comm, distance, step
from diffusers_rocm.benchmarks.comm import IN_A_ROW, Collective, MeshComm, comm_table, measure_comm
from diffusers_rocm.distributed import collectives
from diffusers_rocm.distributed.axis import Axis

from ..testing_utils import in_process, run_ranks, slow
from .test_bench_step import request
from .test_known_models import SMALL


def comm_worker(mesh: str) -> tuple[list[Collective], set[float]]:
    """As measured, and the microseconds of each where every measurement is 10 ms."""
    with mock.patch.object(step.Clock, "milliseconds", lambda *_: 10.0):
        same = {x for each in measure_comm(request(mesh))[0].collectives for x in each.microseconds}
    (found,) = measure_comm(request(mesh))
    assert found.note == "" and found.distance <= distance.BARS[torch.float32]
    return found.collectives, same


def buffers_worker(blocks: int) -> int:
    """How many buffers are made for what a model of so many blocks sends."""
    with mock.patch.object(torch, "zeros_like", wraps=torch.zeros_like) as made:
        measure_comm(request("ulysses=2", config=SMALL["flux"] | {"num_single_layers": blocks}))
    return made.call_count


def models_worker() -> list[int]:
    """How many models of earlier meshes are still there when each is built."""
    built: list[weakref.ref] = []
    found: list[int] = []
    build = comm.build

    def noted(*args: Any) -> torch.nn.Module:
        found.append(sum(model() is not None for model in built))
        model = build(*args)
        built.append(weakref.ref(model))
        return model

    with mock.patch.object(comm, "build", noted):
        measure_comm(request("ring=2", "tp=2", "ulysses=2"))
    return found


def meshes_worker() -> tuple[list[MeshComm], list[Any]]:
    """Of a mesh that is right, one that is farther off than it may be, and one that cannot be had; and what is timed,
    in order."""
    order: list[Any] = []

    def milliseconds(clock: step.Clock, work: Callable[[], None]) -> float:
        work()
        order.append(work)
        return 10.0

    as_near = mock.patch.object(comm, "bar_of", lambda *_: distance.BARS[torch.float32])
    one_head = SMALL["flux"] | {"num_attention_heads": 1, "attention_head_dim": 32, "axes_dims_rope": [8, 12, 12]}
    with as_near, mock.patch.object(step.Clock, "milliseconds", milliseconds):
        found = measure_comm(request("ring=2", "ring=2,int8", "ulysses=2", config=one_head))
    return found, [order.index(work) for work in order]


def off_worker() -> list[str]:
    """What is said of an exact mesh, and of one in 8 bits, whose outputs are a thousandth off."""
    with mock.patch.object(comm, "distance", lambda *_: 1e-3):
        return [each.note.partition(":")[0] for each in measure_comm(request("tp=2", "tp=2,int8"))]


def axes_worker() -> MeshComm:
    return measure_comm(request("tp=2,ulysses=2"))[0]


def wrong_elsewhere_worker() -> list[str]:
    """What `bench comm` and `bench step` say of a mesh whose answer is wrong on the second rank alone."""

    def gathered_wrongly(x: torch.Tensor, sizes: tuple[int, ...], axis: Axis, dim: int) -> Callable[[], torch.Tensor]:
        arrive = start(x, sizes, axis, dim)
        return lambda: arrive() * (1.5 if axis.rank == 1 and x.is_floating_point() else 1)

    start = collectives._start_all_gather
    with mock.patch.object(collectives, "_start_all_gather", gathered_wrongly):
        (found,), (one, row) = measure_comm(request("ulysses=2")), step.measure_step(request("ulysses=2", rounds=1))
    assert not one.note, one
    return [found.note, row.note]


class TestBenchComm(unittest.TestCase):
    def test_comm_in_8_bits_may_be_farther_off(self):
        assert run_ranks(2, off_worker) == [["wrong", ""]] * 2

    def test_comm_keeps_buffers_for_one_call_of_a_kind(self):
        assert run_ranks(2, buffers_worker, 1) == run_ranks(2, buffers_worker, 3)

    def test_comm_holds_one_model(self):
        assert run_ranks(2, models_worker) == [[0, 0, 0, 0]] * 2

    @parameterized.expand([("tp=2",), ("ulysses=2",)])
    def test_comm(self, mesh):
        for found, same in run_ranks(2, comm_worker, mesh):
            assert same == {10e3 / IN_A_ROW}
            calls = {"all-reduce": 0, "all-to-all": 0, "all-gather": 0}
            for each in found:
                calls[each.name] += each.calls
                assert each.axis == mesh.partition("=")[0], each
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

    def test_comm_of_several_meshes(self):
        for (ring, rounded, ulysses), order in run_ranks(2, meshes_worker):
            assert ring.collectives and not ring.note, ring
            assert rounded.note.startswith("wrong: ") and not rounded.collectives, rounded
            assert ulysses.note.startswith("not run: ValueError: ") and not ulysses.collectives, ulysses
            count = len(ring.collectives)
            # Twice, after once before; each time from another one on.
            before, *turns = (order[index : index + count] for index in range(0, len(order), count))
            assert [sorted(turn) for turn in turns] == [before, before] and turns[0] != turns[1], order
            table = comm_table([ring, rounded, ulysses]).splitlines()
            names = [line.partition(": ")[0] for line in table if ": " in line]
            assert names == ["ring=2", "ring=2,int8", "ulysses=2"], table
            assert len(table) == 1 + 3 + count + 1, table

    def test_comm_says_over_which_axis(self):
        for found in run_ranks(4, axes_worker):
            # Modulation is of all ranks of a forward, and what a forward answers of those of a sequence.
            wanted = {"tp all-reduce", "ulysses all-to-all", "ulysses all-gather", "model all-gather"}
            assert {each.title for each in found.collectives} == wanted, found
            assert all(each.title in comm_table([found]) for each in found.collectives)

    def test_comm_of_what_is_wrong_on_another_rank(self):
        for notes in run_ranks(2, wrong_elsewhere_worker):
            assert [note.partition(":")[0] for note in notes] == ["wrong"] * 2, notes

    def test_comm_has_no_guidance(self):
        stderr = StringIO()
        with redirect_stderr(stderr):
            assert commands.main(["bench", "comm", "--device", "cpu", "--mesh", "cfg=2,tp=2"]) == 2
        assert "--mesh cfg=2,tp=2: cfg exchanges once a step" in stderr.getvalue(), stderr.getvalue()

    @slow
    def test_comm_of_what_cannot_be_had(self):
        config = [f"{name}={value}" for name, value in {**SMALL["flux"], "num_attention_heads": 1}.items()]
        command = ["bench", "comm", "--device", "cpu", "--mesh", "ulysses=2", "--resolution", "64"]
        command += ["--config", *config]
        run = in_process(lambda: commands.main(command))
        assert run.returncode == 1 and "Traceback" not in run.stderr, run.stderr
        assert "ulysses=2: not run: ValueError: Ulysses over 2 ranks needs as many heads" in run.stdout, run
        assert (
            run.stderr.splitlines()[-1] == "diffusers-rocm: wrong, unchecked or not run, 1 of 1 meshes: ulysses=2"
        ), run


if __name__ == "__main__":
    unittest.main()
