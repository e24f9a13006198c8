"""`diffusers-rocm bench step`: what it measures, what it calls wrong, and what it refuses."""

import importlib.util
import json
import math
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import diffusers
import pytest
import torch
import torch.distributed as dist
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from parameterized import parameterized
from PIL import Image

from diffusers_rocm import commands
from diffusers_rocm.benchmarks import step
from diffusers_rocm.benchmarks.distance import bar_of
from diffusers_rocm.benchmarks.known_models import KNOWN_MODELS, Size, build, count_blocks, inputs
from diffusers_rocm.benchmarks.report import Bar, bars, draw, header, rows_json, table
from diffusers_rocm.benchmarks.step import ONE, Row, StepRequest, measure_step, parse_mesh
from diffusers_rocm.models import attention_parallel
from diffusers_rocm.models.attention_kernels import Platform

from ..hooks.test_step_graph import emulated
from ..testing_utils import in_process, run_ranks, slow
from .test_known_models import SMALL


def request(*meshes: str, **options) -> StepRequest:
    size = Size(256, 256, text=16)
    given = {"config": SMALL["flux"], "dtype": "float32", "device": "cpu", "warmup": 1, "repeats": 2} | options
    return StepRequest("flux", meshes, size, **given)


def as_rows(rows: list[Row]) -> list[tuple]:
    return [(row.name, row.mode, len(row.milliseconds), row.distance, row.note) for row in rows]


def step_worker(*modes: str) -> list[tuple]:
    return as_rows(measure_step(request("tp=2", "ring=2", "tp=2,int8", modes=modes, peers=("cache-dit",))))


class CacheDiT(ModuleType):
    """Puts its attention in the place of diffusers', the first time, as cache-dit does."""

    def __init__(self):
        super().__init__("cache_dit")
        self.is_registered = False
        self.configs: list[dict] = []

    ParallelismConfig = dict

    def enable_cache(self, model, parallelism_config):
        self.configs.append(parallelism_config)
        if not self.is_registered:
            native = next(each for each in _AttentionBackendRegistry._backends if each.value == "native")
            _AttentionBackendRegistry._backends[native] = self.attention
            self.is_registered = True
        model.set_attention_backend(parallelism_config["attention_backend"])

    def attention(self, query, key, value, **kwargs):
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)


def backends_worker() -> tuple[list[str], list[str]]:
    """diffusers' backend when each row's model is built, and the module of its function."""
    seen = []

    def look():
        backend, function = _AttentionBackendRegistry.get_active_backend()
        seen.append(f"{AttentionBackendName(backend).value} of {function.__module__.partition('.')[0]}")

    def built(*args):
        look()
        return build(*args)

    peers = ("diffusers", "cache-dit")
    with mock.patch.object(step, "build", built), mock.patch.dict(sys.modules, {"cache_dit": CacheDiT()}):
        rows = measure_step(request("ring=2", peers=peers, modes=("eager", "eager"), rounds=1))
    look()
    return seen, [row.note for row in rows if "diffusers" not in row.name]


def besides_worker() -> tuple[list[dict], list[str]]:
    """What cache-dit is asked for beside Ulysses, also that which sends in fewer bits, and the rows."""
    peer, meshes = CacheDiT(), ("tp=2,int8", "int8,ulysses=2", "ulysses=2")
    with mock.patch.dict(sys.modules, {"cache_dit": peer}):
        rows = measure_step(request(*meshes, peers=("cache-dit", "diffusers"), modes=("eager", "eager"), rounds=2))
    return peer.configs, [row.name for row in rows]


def distances_worker() -> list[list]:
    """What is kept after each round in which a row is so far from one rank."""
    seen: dict[str, list] = {}
    off = iter([0.0, 2e-5, 0.0, 1e-5, math.nan, 0.0] if dist.get_rank() == 0 else [0.0] * 6)

    def told(row):
        seen.setdefault(row.name, []).append(row.note or row.distance)

    with mock.patch.object(step, "distance", lambda *_: next(off)):
        measure_step(request("tp=2", rounds=3), told)
    return [*seen.values()]


def guidance_worker(model: str) -> list[tuple]:
    asked = request("cfg=2", "ulysses=2", guidance=True, config=SMALL[model])
    return as_rows(measure_step(replace(asked, model=model)))


def broken_worker(makes_nan: bool) -> tuple[list[tuple], str]:
    """Tensor parallelism that forgets to add up, or makes what is no number."""
    with mock.patch.object(dist, "all_reduce", lambda x, *_, **__: x.fill_(math.nan) if makes_nan else None):
        rows = measure_step(request("tp=2"))
    return as_rows(rows), table(rows)


def part_worker(in_float32: bool) -> list[tuple]:
    """A ring that forgets the second half of the keys."""
    shortened = {"config": {**SMALL["flux"], "num_layers": 1, "num_single_layers": 1}, "dtype": "bfloat16"}
    with mock.patch.object(attention_parallel, "merge", lambda out, lse, *args, **kwargs: (out, lse)):
        return as_rows(measure_step(request("ring=2", "ring=2,int8", "tp=2", in_float32=in_float32, **shortened)))


def no_room_worker() -> list[tuple]:
    """For the second row, and only once its steps are timed."""
    timed, calls = step.Clock.milliseconds, []

    def milliseconds(clock, work):
        calls.append(work)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no room")
        return timed(clock, work)

    with mock.patch.object(step.Clock, "milliseconds", milliseconds):
        return as_rows(measure_step(request("tp=2", "ring=2", rounds=1)))


def order_worker() -> tuple[list[str], list[int]]:
    """The rows in the order in which they are run, and how many steps come before the first that is timed."""
    order, steps, before = [], [], []
    run, timed, made = step._Runner.run, step.Clock.milliseconds, step._Runner._step

    def noted(runner, row):
        order.append(row.name)
        steps.clear()
        run(runner, row)

    def counted(*args):
        one = made(*args)
        return lambda: (steps.append(1), one())[1]

    def milliseconds(clock, work):
        before.append(len(steps))
        return timed(clock, work)

    with mock.patch.multiple(step._Runner, run=noted, _step=counted):
        with mock.patch.object(step.Clock, "milliseconds", milliseconds):
            measure_step(request("tp=2", "ring=2", "ulysses=2", rounds=2, warmup=3, repeats=1))
    return order, before


def compiled_worker() -> tuple[list[tuple[int, str, bool, bool]], int]:
    """Of each row whose blocks were compiled its number, mode, whether fully, and whether it was a graph by then; and
    for how many places were let go."""
    compiled, rows = [], []
    run = step._Runner.run

    def noted(runner, row):
        rows.append(row.mode)
        run(runner, row)

    def compile_repeated_blocks(model, **options):
        compiled.append((len(rows), rows[-1], options["fullgraph"], hasattr(model, "around_call")))

    with mock.patch.object(step._Runner, "run", noted), mock.patch.object(step, "forget_places") as forgotten:
        with mock.patch.object(diffusers.ModelMixin, "compile_repeated_blocks", compile_repeated_blocks), emulated():
            measure_step(request("tp=2", modes=("eager", "compile", "compile+graph"), rounds=1))
    return compiled, forgotten.call_count


class TestBenchStep(unittest.TestCase):
    def test_rows(self):
        self.check_rows("eager")

    # Two to three minutes where nothing was compiled before, and longer beside other tests.
    @slow
    @pytest.mark.timeout(600)
    def test_rows_in_two_modes(self):
        self.check_rows("eager", "compile", timeout=540)

    def check_rows(self, *modes: str, timeout: float = 240) -> None:
        """Every mesh in every mode, twice two times; a peer that is not installed is said, and not timed."""
        if importlib.util.find_spec("cache_dit") is not None:
            self.skipTest("cache-dit is installed")
        names = [ONE, "tp=2", "ring=2", "tp=2,int8", "cache-dit tp=2", "cache-dit ring=2"]
        for rows in run_ranks(2, step_worker, *modes, timeout=timeout):
            assert [row[:2] for row in rows] == [(name, mode) for mode in modes for name in names]
            for name, _, count, distance, note in rows:
                if "cache-dit" in name:
                    assert (count, distance) == (0, None) and "No module named 'cache_dit'" in note, rows
                else:
                    assert (count, note) == (4, "") and distance <= (5e-2 if "int8" in name else 1e-4), rows
                    assert "int8" not in name or distance > 1e-4, rows

    def test_a_peer_keeps_its_kernels_to_itself(self):
        """diffusers' ring sets another backend than cache-dit replaces, each for the whole process."""
        for seen, notes in run_ranks(2, backends_worker):
            assert seen == ["native of diffusers"] * 7 + ["native of tests", "native of diffusers"]
            assert notes == [""] * 6

    @slow
    def test_a_peer_sends_in_fewer_bits_and_beside_what_is_computed(self):
        """The latter last in all modes and rounds, since it leaves classes of diffusers changed."""
        alone = {"ulysses_size": 2, "attention_backend": "native"}
        for configs, names in run_ranks(2, besides_worker):
            assert configs == [alone | {"ulysses_float8": True}, alone] * 4 + [alone | {"ulysses_async": True}] * 4
            peers = [f"cache-dit ulysses=2{way}" for way in (",float8", "", ",async")]
            ours = ["tp=2,int8", "int8,ulysses=2", "ulysses=2"]
            assert names == [ONE, *ours, *peers, "diffusers ulysses=2"] * 2, names

    def test_the_largest_distance_is_kept(self):
        """Of all rounds; what is no number stays that."""
        for rows in run_ranks(2, distances_worker):
            assert rows[1] == [2e-5, 2e-5, "wrong: nan from one rank, more than 2.4e-05"], rows

    @parameterized.expand(["flux", "z-image"])
    def test_guidance(self, model):
        """Z-Image takes lists, and answers with one."""
        for rows in run_ranks(2, guidance_worker, model):
            assert len(rows) == 3 and all(row[2] == 4 and row[3] <= 1e-4 for row in rows), rows

    def test_forwards_of_guidance_differ(self):
        """Else a rank that answers for both would be right: FLUX.1 knows no order of its text."""
        runner = step._Runner(request("cfg=1", guidance=True), torch.device("cpu"))
        model = runner._build()
        with torch.no_grad():
            one, other = runner._step(
                model, inputs(KNOWN_MODELS["flux"], Size(64, 64, text=16), model, torch.float32)
            )()
        assert (one - other).norm() > 0.05 * one.norm()

    def test_wrong_is_not_timed(self):
        for makes_nan in (False, True):
            for rows, shown in run_ranks(2, broken_worker, makes_nan):
                assert rows[0][4] == "" and rows[1][4].startswith("wrong: nan " if makes_nan else "wrong: "), rows
                line = next(line for line in shown.splitlines() if line.startswith("tp=2"))
                assert re.fullmatch(r"tp=2 +eager +wrong: \S+ from one rank, more than \S+", line), shown

    @slow
    def test_a_part_of_the_keys_that_is_missing(self):
        """Is seen in bfloat16 too, by either reference; what is sent in fewer bits is held to as much."""
        for in_float32, reference in ((True, "float32"), (False, ONE)):
            for rows in run_ranks(2, part_worker, in_float32):
                for row in rows[1:3]:
                    assert re.match(rf"wrong: \S+ from {reference}, more than", row[4]), rows
                assert rows[0][4] == rows[3][4] == "" and 0 < rows[3][3], rows
                assert not in_float32 or rows[3][3] < 1.25 * rows[0][3], rows

    def test_bar_of_many_blocks(self):
        """All rows that were kept are within it, and a ring of 57 blocks that weighs its parts wrongly is not."""
        assert bar_of(57, torch.bfloat16, lossy=False) < 7e-2
        seen = 0
        for file in (Path(__file__).parents[2] / "docs" / "benchmarks").glob("step_*.json"):
            run = json.loads(file.read_text())
            known = KNOWN_MODELS[run["request"]["model"]]
            with torch.device("meta"):
                count = count_blocks(getattr(diffusers, known.cls)(**known.config | run["request"]["config"]))
            for row in (row for row in run["rows"] if not row["note"]):
                lossy = "int8" in row["name"] or "float8" in row["name"]
                assert row["distance"] <= 0.8 * bar_of(count, torch.bfloat16, lossy), (file.name, row)
                seen += 1
        assert seen > 200, seen

    def test_rounds_begin_with_another_row_and_rows_with_a_warm_up(self):
        rows = [ONE, "tp=2", "ring=2", "ulysses=2"]
        for order, before in run_ranks(2, order_worker):
            assert order == rows + rows[2:] + rows[:2] and before == [3] * 8, (order, before)

    def test_a_mode_is_what_it_is_called(self):
        for compiled, forgotten in run_ranks(2, compiled_worker):
            wanted = [(row, "compile", True, False) for row in (3, 4)]
            wanted += [(row, "compile+graph", True, True) for row in (5, 6)]
            assert compiled == wanted and forgotten == 6, (compiled, forgotten)

    def test_how_diffusers_is_asked(self):
        def asked(mesh: str) -> tuple[object, list]:
            model = mock.Mock(device=torch.device("cuda"))
            with mock.patch.object(step, "platform_of", lambda _: Platform("cuda", (9, 0))):
                step._enable_diffusers(model, parse_mesh(mesh))
            return model.enable_parallelism.call_args.kwargs["config"], model.set_attention_backend.call_args_list

        config, backends = asked("ring=2,ulysses=3")
        assert (config.ring_degree, config.ulysses_degree) == (2, 3) and backends == [mock.call("_native_cudnn")]
        config, backends = asked("ulysses=3")
        assert (config.ring_degree, config.ulysses_degree, backends) == (1, 3, [])
        if hasattr(diffusers, "TensorParallelConfig"):
            config, backends = asked("tp=4")
            assert (config.tp_degree, backends) == (4, [])
        with pytest.raises(ValueError, match="has no tp x ulysses"):
            asked("tp=2,ulysses=2")

    def test_how_far_a_row_may_be_from_float32(self):
        runner = SimpleNamespace(_from_float32={"eager": 0.01}, _blocks=1, _dtype=torch.bfloat16)
        bars = {name: step._Runner._bar(runner, Row(name, "eager")) for name in (ONE, "tp=2", "tp=2,int8")}
        assert bars == {ONE: 0.02, "tp=2": 0.0125, "tp=2,int8": 0.015}, bars

    def test_no_room_while_steps_are_timed(self):
        """Costs that row alone."""
        for rows in run_ranks(2, no_room_worker):
            assert [row[4] == "" for row in rows] == [True, False, True], rows
            assert rows[1][2] == 0 and "no room" in rows[1][4], rows

    def test_command(self):
        with tempfile.TemporaryDirectory() as folder:
            output, file = StringIO(), Path(folder, "made", "step.json")
            config = [f"{name}={value}" for name, value in SMALL["flux"].items()]
            arguments = ["--mesh", " tp=1 ", "--resolution", "128", "--text", "16", "--repeats", "2", "--rounds", "1"]
            with redirect_stdout(output), redirect_stderr(StringIO()):
                code = commands.main(
                    ["bench", "step", "--device", "cpu", *arguments, "--config", *config, "--json", str(file)]
                )
            written = json.loads(file.read_text())
        assert code == 0
        first, where, _, _, one, tp = output.getvalue().splitlines()
        assert first.startswith("flux (FluxTransformer2DModel, num_layers=1") and "1 rank(s) on CPU" in where
        assert re.fullmatch(r"tp=1 +eager +\d+\.\d\d +\(.* to .*\) +\d\.\d\dx +- +0\.0e\+00", tp), tp
        assert [row["name"] for row in written["rows"]] == [ONE, "tp=1"] and written["rows"][1]["speedup"] > 0
        assert written["command"].startswith("diffusers-rocm bench step --device cpu")
        assert folder not in written["command"] and written["request"]["config"]["num_layers"] == 1

    def test_what_is_stopped_leaves_its_rows(self):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "step.json")
            config = [f"{name}={value}" for name, value in SMALL["flux"].items()]
            small = ["--resolution", "128", "--text", "16", "--repeats", "1", "--rounds", "2", "--config", *config]
            command = [sys.executable, "-m", "diffusers_rocm", "bench", "step", "--device", "cpu", *small]
            command += ["--mesh", "tp=2", "--mode", "eager", "compile", "--json", str(file)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
                deadline = time.monotonic() + 300
                while not file.exists() and time.monotonic() < deadline:
                    time.sleep(0.05)
                process.terminate()
                assert process.wait(60) == 128 + signal.SIGTERM
            rows = json.loads(file.read_text())["rows"]
        first = rows[0]
        assert 1 <= len(rows) < 4 and (first["name"], first["mode"]) == (ONE, "eager") and first["ms"] > 0, rows

    def test_chart(self):
        rows = [Row(ONE, "eager", [10.0], [0]), Row("tp=2", "eager", [6.0], [0]), Row("ring=2", "eager", note="none")]
        with tempfile.TemporaryDirectory() as folder:
            draw([*bars(rows), Bar("long", 3.0, "3")], f"title\n{'word ' * 60}", "ms", Path(folder, "chart.png"))
            with Image.open(Path(folder, "chart.png")) as image:
                assert image.width > 500
        with mock.patch("matplotlib.figure.Figure.savefig", autospec=True) as saved:
            draw(bars(rows), "title", "ms", Path("chart.png"))
        (axes,) = saved.call_args.args[0].axes
        assert [text.get_text() for text in axes.texts] == ["10.0  (1.00x)", "6.0  (1.67x)", "none"]
        assert [bar.get_width() for bar in axes.patches] == [10.0, 6.0, 0.0] and axes.get_xlabel() == "ms"

    def test_header(self):
        """Versions, settings and the links between GPUs, without the legend that tools print below them."""
        matrix = "$ nvidia-smi topo -m\nGPU0\tGPU1\nGPU0\t X \tNV18"
        environment = {
            "gpus": [{"name": "H100"}] * 2,
            "packages": {"torch": "2.11", "cache-dit": "1.5"},
            "torch build": "CUDA 13.0",
            "collectives": ["NCCL 2.28.9"],
            "environment": {"NCCL_P2P_DISABLE": "1", "CUDA_PATH": "x"},
            "topology": f"{matrix}\n\nLegend:\n  X = Self",
        }
        on_gpus = header(request("tp=2", device=None), environment, 2)
        assert on_gpus.endswith(
            f"\n2 x H100, CUDA 13.0, NCCL 2.28.9, torch 2.11, cache-dit 1.5, NCCL_P2P_DISABLE=1\n{matrix}"
        )
        assert header(request("tp=2"), environment, 2).endswith("torch 2.11, cache-dit 1.5, NCCL_P2P_DISABLE=1")

    def test_speedups(self):
        """Over one rank in the same mode; nothing where there is none."""
        rows = [
            Row(ONE, "eager", [8.0, 10.0, 30.0], [0]),
            Row("tp=2", "eager", [5.0], [2**30]),
            Row(ONE, "compile", note="not run: no room"),
            Row("tp=2", "compile", [4.0], [2**30]),
        ]
        written = rows_json(rows)
        assert [row["speedup"] for row in written] == [1.0, 2.0, None, None]
        assert [row["ms"] for row in written] == [10.0, 5.0, None, 4.0]

    def test_json_of_what_is_wrong(self):
        """Has no times, and is JSON."""
        rows = [Row(ONE, "eager", [8.0], [0]), Row("tp=2", "eager", [5.0], [0], math.nan, "wrong: nan from one rank")]
        (_, wrong) = json.loads(json.dumps(rows_json(rows), allow_nan=False))
        assert [wrong[name] for name in ("ms", "speedup", "distance", "milliseconds")] == [None, None, None, []], wrong

    def test_what_did_not_run_is_no_success(self):
        stdout, stderr = StringIO(), StringIO()
        config = [f"{name}={json.dumps(value)}" for name, value in SMALL["flux"].items()]
        no_room = mock.patch.object(step, "build", side_effect=RuntimeError("no room"))
        with redirect_stdout(stdout), redirect_stderr(stderr), no_room:
            code = commands.main(
                ["bench", "step", "--device", "cpu", "--mesh", "tp=1", "--resolution", "64", "--config", *config]
            )
        said = stderr.getvalue()
        assert code == 1 and "one rank, eager: not run: " in said, said
        assert said.endswith("\ndiffusers-rocm: wrong or not run, 2 of 2 rows: one rank, eager; tp=1, eager\n"), said

    @slow
    def test_what_ranks_did_not_run(self):
        """The table is there, and below it what is wrong with the run: no rank failed."""
        config = [f"{name}={value}" for name, value in {**SMALL["flux"], "num_attention_heads": 1}.items()]
        command = ["bench", "step", "--device", "cpu", "--mesh", "tp=2", "--resolution", "64", "--config", *config]
        run = in_process(lambda: commands.main(command))
        *_, one, tp = run.stdout.splitlines()
        assert run.returncode == 1 and one.endswith("0.0e+00") and tp.startswith("tp=2  "), run
        assert "not run: ValueError: " in tp, tp
        assert run.stderr.endswith("\ndiffusers-rocm: wrong or not run, 1 of 2 rows: tp=2, eager\n"), run.stderr


if __name__ == "__main__":
    unittest.main()
