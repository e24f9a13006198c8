"""What `bench` makes of what it measures: figures of hand-made rows, what is timed, and how a run ends."""

import unittest
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from typing import Any
from unittest import mock

import torch
from parameterized import parameterized

from diffusers_rocm import commands
from diffusers_rocm.benchmarks import step
from diffusers_rocm.benchmarks.comm import Collective, MeshComm, comm_table
from diffusers_rocm.benchmarks.report import how, table
from diffusers_rocm.benchmarks.step import ONE, Row, measure_step
from diffusers_rocm.benchmarks.whole_run import STAGES, Run, runs_table
from diffusers_rocm.commands import bench_memory, bench_step
from diffusers_rocm.distributed.axis import Axis
from diffusers_rocm.distributed.collectives import COMPRESSED_FROM
from diffusers_rocm.hooks import step_graph

from ..hooks.test_step_graph import emulated
from ..testing_utils import run_ranks
from .test_bench_step import request
from .test_known_models import SMALL


def captures_worker() -> tuple[int, int]:
    """How many graphs were captured while steps were timed, and in all."""
    timed, while_timed = step.Clock.milliseconds, 0

    def milliseconds(*args: Any) -> float:
        nonlocal while_timed
        before = recorder.captures
        found = timed(*args)
        while_timed += recorder.captures - before
        return found

    with emulated() as recorder, mock.patch.object(step.Clock, "milliseconds", milliseconds):
        measure_step(request("tp=2", modes=("graph",), rounds=1))
    return while_timed, recorder.captures


def never_captured_worker() -> list[Row]:
    """A model whose weights lie elsewhere in each call."""
    holds = mock.patch.object(step_graph._Fixed, "holds", lambda _: False)
    with emulated(), holds:
        return measure_step(request("tp=2", modes=("graph",), rounds=1))


class TestBenchFigures(unittest.TestCase):
    def test_of_collectives(self):
        """4 MB, of the rank with the most, in 20 microseconds, 100 times."""
        found = Collective("ring", "all-to-all", [1_000_000, 4_000_000], 100, [10.0, 20.0, 40.0])
        assert (found.median, found.gigabytes_a_second, found.milliseconds_a_step) == (20.0, 200.0, 2.0)
        other = Collective("tp", "all-reduce", [8_000_000, 8_000_000], 10, [80.0])
        *_, line, total = comm_table([MeshComm("ring=2,tp=2", 0.0, collectives=[other, found])]).splitlines()
        assert " ".join(line.split()) == "ring all-to-all 4.000 100 20.0 (10.0 to 40.0) 200.00 2.000", line
        assert total.split() == ["all", "of", "them", "110", "2.800"], total

    def test_of_steps(self):
        """The median, least and most, over one rank, and the peak of the rank with the most; under its head."""
        rows = [
            Row(ONE, "eager", [8.0, 10.0, 30.0], [2**30, 2**31], 0.0),
            Row("ring=2,ulysses=2", "compile", note="wrong: 1 from one rank, and this is said at length"),
            Row("tp=2", "eager", [5.0, 2.0, 4.0], [2**30], 1e-2),
        ]
        heads, *_, tp = lines = table(rows).splitlines()
        assert lines[1].split()[2:] == ["eager", "10.00", "(8.00", "to", "30.00)", "1.00x", "2.00", "0.0e+00"], lines
        assert tp.split() == ["tp=2", "eager", "4.00", "(2.00", "to", "5.00)", "2.50x", "1.00", "1.0e-02"], lines
        assert len(heads) == len(tp) and heads.index("ms") + len("ms") == tp.index("4.00") + len("4.00"), lines

    def test_of_pictures(self):
        """A long name, and long times, leave the columns where they are."""
        times = {stage: [1.0, 3.0, 2.0] for stage in STAGES}
        long = {stage: [123456.0] for stage in STAGES}
        runs = [
            Run(ONE, times, forward=0.0, distance=0.0),
            Run("ring=2,ulysses=2,int8,allgather", long, forward=1e-3, distance=2e-2),
            Run("tp=2", note="no"),
        ]
        heads, one, mesh, tp = lines = runs_table(runs).splitlines()
        assert one.split()[2:] == [*["2.000"] * 4, "6.000", "(3.000", "to", "9.000)", "1.00x", *["0.0e+00"] * 2], lines
        assert len(heads) == len(one) == len(mesh) and mesh.split()[-3:] == ["0.00x", "1.0e-03", "2.0e-02"], lines
        assert tp.split() == ["tp=2", "no"], lines

    def test_collectives_that_take_long_stay_apart(self):
        found = Collective("ulysses", "all-gather", [10**12], 100, [123456.0, 173456.4, 223456.7])
        heads, _, line, total = lines = comm_table([MeshComm("ulysses=2", 0.0, collectives=[found])]).splitlines()
        assert "173456.4  (123456.0 to 223456.7)" in line and len(heads) == len(line) == len(total), lines

    def test_steps_are_timed_once_they_are_graphs(self):
        assert run_ranks(2, captures_worker) == [(0, 2)] * 2

    def test_a_graph_that_never_is_one_has_no_times(self):
        for rows in run_ranks(2, never_captured_worker):
            for row in rows:
                assert (row.note, row.milliseconds) == ("not run: RuntimeError: its steps became no graph", []), row

    def test_ranks_wait_on_the_host(self):
        """While one process has all GPUs, a message of another that waits on one of them is what would be timed."""
        on_gpus = replace(Axis.single("world"), size=2, device=torch.device("cuda"))
        with mock.patch.object(Axis, "of_all", lambda: on_gpus):
            runner = step._Runner(request("tp=2"), torch.device("cpu"))
        assert runner._world == replace(on_gpus, device=torch.device("cpu"))

    def test_how_closely_8_bits_are_checked(self):
        exact = f"\nof 8 bits: sums of fewer than {COMPRESSED_FROM} elements stay exact"
        closer = exact + "; they are checked more closely by "
        lossy = request("tp=2", "tp=2,int8")
        assert how(lossy).endswith(f"relative L2 to one rank{closer}--dtype bfloat16 --float32-reference")
        assert how(replace(lossy, dtype="bfloat16")).endswith(f"{closer}--float32-reference")
        assert how(request("tp=2")).endswith("relative L2 to one rank")
        assert how(request("tp=2,int8", in_float32=True)).endswith("relative L2 to float32" + exact)

    @parameterized.expand(
        [
            ("diffusers tp=1", "not run: ValueError: no such thing", 0),
            ("diffusers tp=1", "wrong: 1.0e-01 from one rank, more than 2.0e-02", 1),
            ("tp=1", "not run: ValueError: no such thing", 1),
        ]
    )
    def test_how_a_run_ends(self, name, note, wanted):
        """What a peer cannot do is no failure; a row that is wrong is, and one of ours that was not run."""
        rows = [
            Row(ONE, "eager", [8.0], [0], 0.0),
            Row("tp=1", "eager", [8.0], [0], 0.0),
            Row(name, "eager", note=note),
        ]
        config = [f"{key}={value}" for key, value in SMALL["flux"].items()]
        command = ["bench", "step", "--device", "cpu", "--mesh", "tp=1", "--resolution", "64", "--config", *config]
        stderr, measured = StringIO(), mock.patch.object(bench_step, "measure_step", lambda *_: rows)
        with redirect_stdout(StringIO()), redirect_stderr(stderr), measured:
            assert commands.main(command) == wanted, stderr.getvalue()

    def test_a_mesh_of_bench_memory(self):
        """Stands for the axes, and for how they send."""
        asked = []
        with mock.patch.object(bench_memory, "on_ranks", lambda world, *_: asked.append(world) or 0):
            assert commands.main(["bench", "memory", "--device", "cpu", "--mesh", "ring=2,tp=2"]) == 0
        assert asked == [4]
        args = commands.make_parser().parse_args(
            ["bench", "memory", "--device", "cpu", "--mesh", "ring=2,int8,allgather"]
        )
        picture = bench_memory.check(args)
        assert (picture.ring, picture.communication, picture.rotate_method) == (2, "int8", "allgather"), picture
        told = "dtype auto, max-sequence-length=16, communication=int8, rotate-method=allgather"
        assert picture.described() == f"128x128, 2 steps, {told}", picture.described()
        for mesh, arguments, said in (
            (["tp=2"], ["--tp", "2"], "from --mesh tp=2, or from --tp"),
            (["xp=2"], [], "'xp=2' is"),
            (["tp=2", "ring=2"], [], "bench memory runs one mesh, and --mesh gives 2: run it once for each"),
            (["tp=2", "--mesh", "ring=2"], [], "bench memory runs one mesh, and --mesh gives 2: run it once for each"),
        ):
            stderr = StringIO()
            with redirect_stderr(stderr):
                code = commands.main(["bench", "memory", "--device", "cpu", "--mesh", *mesh, *arguments])
            assert code == 2 and said in stderr.getvalue(), stderr.getvalue()


if __name__ == "__main__":
    unittest.main()
