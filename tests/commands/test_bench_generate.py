"""`diffusers-rocm bench generate`: stages that add up, pictures that are compared, requests that are refused."""

import json
import re
import tempfile
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel
from parameterized import parameterized
from torch.utils._pytree import tree_map_only

from diffusers_rocm import commands, pipelines
from diffusers_rocm.benchmarks import whole_run
from diffusers_rocm.benchmarks.report import OF_8_BITS
from diffusers_rocm.benchmarks.step import ONE
from diffusers_rocm.benchmarks.whole_run import STAGES, Run, measure_runs, runs_table
from diffusers_rocm.distributed.mesh import AXES
from diffusers_rocm.hooks import step_graph
from diffusers_rocm.hooks.step_graph import WARM_UP
from diffusers_rocm.models import attention_parallel
from diffusers_rocm.pipelines.generation import GenerationRequest
from diffusers_rocm.pipelines.model_folder import EMBEDDED_MODEL

from ..testing_utils import run_ranks


REQUEST = GenerationRequest(str(EMBEDDED_MODEL), ("a red circle",), steps=2, height=64, width=64, device="cpu")
GUIDED = replace(REQUEST, negative_prompt="a blue square", guidance=4.0)


def worker() -> list[Run]:
    return measure_runs(REQUEST, ("tp=2", "ulysses=2", "ulysses=2,int8"), repeats=1)


def other_picture_worker() -> list[Run]:
    """The first forward is right, and what comes of it is not."""

    def upside_down(request, repeats, device, run, made, wanted):
        measure(request, repeats, device, run, made, wanted)
        made.picture = made.picture if run.mesh == ONE else made.picture.flip(1)

    measure = whole_run._measure
    with mock.patch.object(whole_run, "_measure", upside_down):
        return measure_runs(REQUEST, ("tp=2",), repeats=1)


def rounded_worker() -> list[Run]:
    return measure_runs(replace(REQUEST, communication="int8"), ("ulysses=2",), repeats=1)


def not_made_whole_worker() -> list[list[Run]]:
    """Shards of which no rank can make, or has room for, the whole."""
    asked = replace(REQUEST, offload="disk"), replace(REQUEST, quantization="int8")
    return [measure_runs(each, ("tp=2", "tp=2,ulysses=1"), repeats=1) for each in asked]


@contextmanager
def recorded(replayed: Callable[[Any], Any]) -> Iterator[None]:
    """Steps that are graphs, as if on a GPU, and call no forward: what they answer is `replayed` of an answer."""

    def record(call, *_):
        return lambda: None, replayed(call()), None

    has_a_gpu = mock.Mock(wraps=torch, cuda=mock.Mock(wraps=torch.cuda, is_available=lambda: True))
    with mock.patch.object(step_graph, "record", record), mock.patch.object(pipelines, "torch", has_a_gpu):
        yield


def nothing(answer: Any) -> Any:
    return tree_map_only(torch.Tensor, torch.zeros_like, answer)


def graph_worker(is_right: bool) -> list[Run]:
    """The mesh's graph, which is the second one, may answer nothing."""
    graphs = []

    def replayed(answer):
        graphs.append(answer)
        return answer if is_right or len(graphs) == 1 else nothing(answer)

    with recorded(replayed):
        return measure_runs(replace(REQUEST, steps=WARM_UP + 4, graph=True), ("tp=2",), repeats=1)


@contextmanager
def wrong_branch() -> Iterator[None]:
    """The second rank of cfg=2 answers for the first one's branch, too."""
    original = FluxTransformer2DModel.forward
    texts: list[torch.Tensor] = []

    def forward(self, *args, encoder_hidden_states, **kwargs):
        texts.append(encoder_hidden_states)
        if self.parallelism.axes.cfg.rank == 1:
            encoder_hidden_states = texts[0]
        return original(self, *args, encoder_hidden_states=encoder_hidden_states, **kwargs)

    with mock.patch.object(FluxTransformer2DModel, "forward", forward):
        yield


def one_branch_worker(dtype: str) -> list[Run]:
    with wrong_branch():
        return measure_runs(replace(GUIDED, dtype=dtype), ("cfg=2",), repeats=1)


def guidance_worker(dtype: str) -> list[Run]:
    return measure_runs(replace(GUIDED, dtype=dtype), ("cfg=2", "ulysses=2"), repeats=1)


def broken_worker(where: str, dtype: str) -> tuple[list[Run], str]:
    """Sums that are not made, or rings in which each rank attends to its own keys."""
    reduce = dist.all_reduce

    def forget(x, *args, **kwargs):
        return reduce(x, *args, **kwargs) if x.ndim < 2 else None

    def alone(out, lse, part, part_lse, into=None):
        return (out if into is None else into.copy_(out)), lse

    broken = {"tp=2": (dist, "all_reduce", forget), "ring=2": (attention_parallel, "merge", alone)}[where]
    with mock.patch.object(*broken):
        runs = measure_runs(replace(REQUEST, dtype=dtype), (where,), repeats=1)
    return runs, runs_table(runs)


def rounds_worker() -> tuple[list[str], list[Run]]:
    """Of which meshes it is told, in their order, where the second is wrong from the second picture on."""

    def upside_down_later(request, repeats, device, run, made, wanted):
        again = bool(run.times)
        measure(request, repeats, device, run, made, wanted)
        if again and run.mesh == "ring=2":
            made.picture = made.picture.flip(1)

    measure, order = whole_run._measure, []
    with mock.patch.object(whole_run, "_measure", upside_down_later):
        runs = measure_runs(REQUEST, ("tp=2", "ring=2"), 2, 3, lambda run: order.append(run.mesh))
    return order, runs


class TestBenchGenerate(unittest.TestCase):
    def test_runs(self):
        for runs in run_ranks(2, worker):
            assert [run.mesh for run in runs] == [ONE, "tp=2", "ulysses=2", "ulysses=2,int8"]
            for run in runs:
                assert not run.note and (run.distance > 1e-3 if "int8" in run.mesh else run.distance <= 1e-5), run
                assert list(run.times) == list(STAGES) and min(run.times[name][0] for name in STAGES[:3]) > 0, run

    def test_all_meshes_in_8_bits(self):
        """Which one rank, that sends nothing, is not."""
        for one, ulysses in run_ranks(2, rounded_worker):
            assert one.note == ulysses.note == "" and ulysses.forward > 1e-3, ulysses

    def test_rounds(self):
        for order, runs in run_ranks(2, rounds_worker):
            assert order == [ONE, "tp=2", "ring=2", "tp=2", "ring=2", ONE, ONE, "tp=2"], order
            assert [bool(run.note) for run in runs] == [False, False, True], runs
            for run in runs[:2]:
                counts = {name: len(times) for name, times in run.times.items()}
                assert counts == dict.fromkeys(STAGES, 6) | {"load": 3}, counts
                assert len(run.pictures) == 6 and run.distance <= 1e-5, run

    def test_shards_are_not_made_whole(self):
        for found in run_ranks(2, not_made_whole_worker):
            assert [run.note for runs in found for run in runs] == [""] * 6, found

    def test_stages_of_graphs(self):
        """A step that is replayed is a part of denoising, too."""
        for runs in run_ranks(2, graph_worker, True):
            for run in runs:
                assert run.note == "" and run.times["denoise"][0] > 0, run

    def test_wrong_graphs(self):
        for one, tp in run_ranks(2, graph_worker, False):
            assert one.note == "" and tp.forward == 1, tp

    def test_wrong_on_one_rank(self):
        """In its branch of guidance: the others', and the first forward, are right; in 16 bits the picture is near."""
        for one, cfg in run_ranks(2, one_branch_worker, "bfloat16"):
            assert one.note == "" and cfg.note and cfg.forward > 0.05 and cfg.distance < 0.5, cfg

    def test_another_picture(self):
        for one, tp in run_ranks(2, other_picture_worker):
            assert not one.note and tp.note and tp.forward <= 1e-5, tp

    @parameterized.expand(["float32", "bfloat16"])
    def test_guidance(self, dtype):
        for runs in run_ranks(2, guidance_worker, dtype):
            assert [run.note for run in runs] == [""] * 3, runs

    @parameterized.expand([("tp=2", "float32"), ("tp=2", "bfloat16"), ("ring=2", "bfloat16")])
    def test_wrong(self, mesh, dtype):
        for runs, shown in run_ranks(2, broken_worker, mesh, dtype):
            assert [run.note != "" for run in runs] == [False, True], runs
            line = shown.splitlines()[-1]
            assert re.fullmatch(rf"{mesh} +wrong: forwards are \S+ from one rank, the picture \S+", line), line
            assert runs[1].forward > 0.1, runs
            kept = json.loads(json.dumps(runs[1].as_json(), allow_nan=False))
            assert kept["times"] == {} and kept["picture"] is None, kept

    def test_command(self):
        with tempfile.TemporaryDirectory() as folder:
            output, file = StringIO(), Path(folder, "made", "runs.json")
            with redirect_stdout(output), redirect_stderr(StringIO()):
                meshes = ["--mesh", "tp=1", " tp=1", "--mesh", "ring=1,int8"]
                code = commands.main(
                    ["bench", "generate", *meshes, "--repeats", "2", "--rounds", "1", "--json", str(file)]
                )
            kept = json.loads(file.read_text())
        rows, asked = kept["rows"], kept["request"]
        assert asked["meshes"] == ["tp=1", "ring=1,int8"] and asked["repeats"] == 2, asked
        assert not asked.keys() & set(AXES), asked
        assert code == 0 and [row["mesh"] for row in rows] == [ONE, "tp=1", "ring=1,int8"]
        for row in rows:
            both = [sum(row["times"][stage][turn] for stage in STAGES[1:]) for turn in range(2)]
            assert row["picture"] == pytest.approx(sum(both) / 2) and len(row["times"]["load"]) == 1
        what, where, how, rounded, head, one, *_ = output.getvalue().splitlines()
        assert (
            what.startswith("tiny-flux-shapes, ")
            and "on CPU" in where
            and how == "seconds: median of 2 in each of 1 round(s)"
            and rounded == OF_8_BITS.strip()
        )
        words = [*STAGES, "picture", "(least", "to", "most)", "L2:", "forward", "picture"]
        assert head.split() == ["seconds", *words] and re.search(r"\(\S+ to \S+\) +1.00x", one), output.getvalue()

    @parameterized.expand(
        [
            ("axis", ["--mesh", "tp=1", "--tp", "2"], "takes its meshes from --mesh"),
            ("ranks", ["--mesh", "tp=2", "ring=3"], "tp=2 is of 2, ring=3 is of 3"),
            ("heads", ["--mesh", "tp=64"], "64"),
            ("repeats", ["--mesh", "tp=1", "--repeats", "0"], "--repeats must be at least 1"),
            ("rounds", ["--mesh", "tp=1", "--rounds", "0"], "--rounds must be at least 1"),
            ("prompts", ["--mesh", "tp=1", "--prompt", "a", "--prompt", "b"], "makes one picture"),
            ("count", ["--mesh", "tp=1", "--num-images-per-prompt", "4"], "makes one picture, and 4 are asked for"),
        ]
    )
    def test_message(self, _, arguments, message):
        stderr = StringIO()
        with redirect_stderr(stderr):
            code = commands.main(["bench", "generate", "--device", "cpu", *arguments])
        assert code == 2 and re.fullmatch(f"diffusers-rocm: .*{message}.*\n", stderr.getvalue()), stderr.getvalue()


if __name__ == "__main__":
    unittest.main()
