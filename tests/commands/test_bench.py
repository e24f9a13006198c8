"""`diffusers-rocm bench memory`: peaks of their stage, a forward that is compared; the random weights it can write."""

import json
import re
import tempfile
import unittest
import weakref
from contextlib import AbstractContextManager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
import torch.distributed as dist
from diffusers import FluxPipeline
from parameterized import parameterized

from diffusers_rocm import ParallelConfig, commands, load_pipeline
from diffusers_rocm.benchmarks import memory
from diffusers_rocm.benchmarks.memory import STAGES, measure_memory, report
from diffusers_rocm.benchmarks.report import OF_8_BITS
from diffusers_rocm.distributed.axis import Axis
from diffusers_rocm.hooks.step_graph import WARM_UP
from diffusers_rocm.pipelines import load, room
from diffusers_rocm.pipelines.model_folder import EMBEDDED_MODEL
from diffusers_rocm.pipelines.peaks import StagePeaks
from diffusers_rocm.pipelines.random_pipeline import FLUX_DEV, write_random_flux
from diffusers_rocm.registration import DTYPE_ARGUMENT

from ..testing_utils import message_of, relative_l2, run_ranks
from .test_bench_generate import GUIDED, REQUEST, nothing, recorded, wrong_branch


# FLUX.1-dev, cut down in depth and width; the checkpoint has several files all the same.
SMALL = {
    "transformer": {**FLUX_DEV["transformer"], "num_layers": 1, "num_single_layers": 2, "num_attention_heads": 4},
    "text_encoder": {**FLUX_DEV["text_encoder"], "num_hidden_layers": 1},
    "text_encoder_2": {**FLUX_DEV["text_encoder_2"], "num_layers": 1, "d_ff": 128, "num_heads": 2},
    "vae": {**FLUX_DEV["vae"], "block_out_channels": [32] * 4},
}


def latents(pipe: FluxPipeline) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    return pipe("a", height=64, width=64, num_inference_steps=1, generator=generator, output_type="pt").images


def random_worker(folder: str) -> float:
    wanted = latents(FluxPipeline.from_pretrained(folder, **{DTYPE_ARGUMENT: torch.float32}))
    return relative_l2(latents(load_pipeline(folder, ParallelConfig(tp=2), device="cpu")), wanted)


def checked_worker() -> list[dict[str, Any]]:
    asked = [replace(REQUEST, tp=2, steps=1), replace(REQUEST, tp=2, offload="disk"), replace(GUIDED, cfg=2)]
    tiled = replace(REQUEST, ulysses=2, vae="tile", vae_tiling=True)
    return [measure_memory(each) for each in (*asked, tiled, replace(REQUEST, tp=2, quantization="int8"))]


def one_after_the_other_worker() -> tuple[list[int], list[bool]]:
    """The forwards of the mesh and of one rank; whether the mesh's weights have gone when one rank's are read."""
    forwards, gone, pipes = [], [], []

    def loaded(*args, **kwargs):
        gone.extend(each() is None for each in pipes)
        pipe, axes = load_of(*args, **kwargs)
        pipes.append(weakref.ref(pipe.transformer.proj_out.weight))
        forwards.append(0)
        pipe.transformer.register_forward_pre_hook(lambda *_: forwards.append(forwards.pop() + 1))
        return pipe, axes

    load_of = memory.load
    with mock.patch.object(memory, "load", loaded):
        measure_memory(replace(REQUEST, tp=2, steps=5))
    return forwards, gone


def wrong_worker(what: str) -> tuple[dict[str, Any], str]:
    """What is wrong: sums, on all ranks; a branch of guidance, or the last step, on the second; the decoder."""
    reduce, load_of, loads = dist.all_reduce, memory.load, []

    def forget(x, *args, **kwargs):
        return reduce(x, *args, **kwargs) if x.ndim < 2 else None

    def loaded(*args, **kwargs):
        pipe, axes = load_of(*args, **kwargs)
        loads.append(0)
        if what == "last step" and len(loads) == 1 and dist.get_rank() == 1:
            pipe.transformer.register_forward_hook(last_step)
        if what == "decoder" and len(loads) == 1:
            decode = pipe.vae.decode
            pipe.vae.decode = lambda *args, **kwargs: nothing(decode(*args, **kwargs))
        return pipe, axes

    def last_step(module, args, output):
        loads[0] += 1
        return nothing(output) if loads[0] == 3 else output

    asked = replace(REQUEST, tp=2, steps=3) if what != "branch" else replace(GUIDED, cfg=2)
    broken = {"sums": mock.patch.object(dist, "all_reduce", forget), "branch": wrong_branch()}
    with broken.get(what, nullcontext()), mock.patch.object(memory, "load", loaded):
        measured = measure_memory(asked)
    return measured, report(measured)


def graph_worker(steps: int, is_right: bool) -> dict[str, Any]:
    with recorded(lambda answer: answer if is_right else nothing(answer)):
        return measure_memory(replace(REQUEST, tp=2, steps=steps, graph=True))


def no_room_worker(where: str) -> tuple[dict[str, Any], str]:
    """On the last rank alone."""
    is_last, sharded_loading = Axis.of_all().rank == 1, load.sharded_loading
    no_host = mock.Mock(wraps=psutil, virtual_memory=lambda: mock.Mock(available=2**20))

    def of_parts(tp: Axis) -> AbstractContextManager[None]:
        if tp.size == 1 and is_last:
            raise torch.OutOfMemoryError("no room for all of it")
        return sharded_loading(tp)

    of_device = mock.patch.object(load, "sharded_loading", of_parts)
    of_host = mock.patch.object(room, "psutil", no_host) if is_last else nullcontext()
    with of_device if where == "device" else of_host:
        measured = measure_memory(replace(REQUEST, tp=2))
    return measured, report(measured)


class TestBench(unittest.TestCase):
    def test_compared_with_one_rank(self):
        for measured in run_ranks(2, checked_worker):
            for each, bar in zip(measured, (1e-5,) * 4 + (3e-2,), strict=True):
                assert each["distance"] <= bar and each["wrong"] == each["unchecked"] == "", each
            assert measured[-1]["distance"] > 1e-3  # rounded otherwise
            assert measured[1]["weights"] == [0, 0], measured[1]  # they are on disk
            shown = report(measured[0])
            assert re.search(r"\nrelative L2 \d\.\de-0\d from one rank$", shown), shown

    def test_one_rank_comes_after_and_takes_three_forwards(self):
        for forwards, gone in run_ranks(2, one_after_the_other_worker):
            assert forwards == [5, 3] and gone == [True], (forwards, gone)

    @parameterized.expand(["sums", "branch", "last step", "decoder"])
    def test_wrong(self, what):
        for measured, shown in run_ranks(2, wrong_worker, what):
            assert measured["distance"] > 0.05 and measured["peaks"] == {} and measured["unchecked"] == "", measured
            assert re.fullmatch(r".*\nwrong: \d\.\de[-+]0\d from one rank", shown), shown

    def test_graphs(self):
        """As memory is that of graphs, so are answers."""
        for measured in run_ranks(2, graph_worker, WARM_UP + 3, False):
            assert measured["distance"] == 1 and measured["peaks"] == {}, measured
        for raised in run_ranks(2, message_of, graph_worker, WARM_UP, True):
            assert "no step became a graph, before which 2 of its kind go" in raised, raised

    def test_wrong_command(self):
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(memory, "bar_for", lambda *_: -1.0):
            file, output, error = Path(folder, "memory.json"), StringIO(), StringIO()
            with redirect_stdout(output), redirect_stderr(error):
                files = ["--json", str(file), "--chart", f"{folder}/memory.png"]
                code = commands.main(["bench", "memory", "--device", "cpu", *files])
            assert json.loads(file.read_text())["peaks"] == {}
        assert code == 1 and "wrong: 0.0e+00 from one rank" in output.getvalue()
        assert error.getvalue().endswith("diffusers-rocm: wrong: 0.0e+00 from one rank\n")

    @parameterized.expand(
        [
            ("device", "one rank is not run: .*no room for all of it"),
            ("host", r"one rank is not run: those of a host need 0\.0 GiB of it, and it has room for 0\.0 GiB"),
        ]
    )
    def test_unchecked(self, where, why):
        for measured, shown in run_ranks(2, no_room_worker, where):
            assert measured["distance"] is None and measured["wrong"] == "", measured
            assert re.search(f"\nunchecked: {why}$", shown), shown
            assert [*measured["peaks"]] == [*STAGES], measured

    def test_memory_of_the_embedded_model(self):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "made", "memory.json")
            output = StringIO()
            with redirect_stdout(output):
                kept = ["--json", str(file), "--chart", f"{folder}/memory.png"]
                code = commands.main(["bench", "memory", "--communication", "int8", *kept])
            measured = json.loads(file.read_text())
            assert Path(folder, "memory.png").stat().st_size > 1000
        assert code == 0 and "one rank on CPU: peak GiB" in output.getvalue() and ", torch " in output.getvalue()
        assert f"{OF_8_BITS}\n" in output.getvalue()
        assert re.search(r"\nweights  kept +\d\.\d\d   largest tensor +\d\.\d\d\n", output.getvalue())
        sizes = [file.stat().st_size for file in EMBEDDED_MODEL.rglob("*.safetensors")]
        # The files are in bfloat16.
        assert 1.8 * sum(sizes) < measured["weights"][0] <= 2 * sum(sizes), (measured["weights"], sizes)
        assert 0 < measured["largest_tensor"][0] < measured["weights"][0]
        assert measured["distance"] <= 1e-5 and output.getvalue().endswith(" from one rank\n"), output.getvalue()
        assert list(measured["peaks"]) == list(STAGES)
        for stage in STAGES:
            assert measured["peaks"][stage]["device"] == [0] and measured["peaks"][stage]["host"][0] > 2**26, stage

    @parameterized.expand(
        [
            ("steps", ["--steps", "0"], "--steps must be at least 1"),
            ("folder", ["--model", "{embedded}"], "--write-random-flux needs a folder to write to"),
            ("json", ["--json", "{folder}"], "--json .* is a folder"),
            ("prompts", ["--prompt", "a", "--prompt", "b"], "makes one picture, and 2 are asked for"),
            ("seeds", ["--seed", "1,2"], "makes one picture, and 2 are asked for: give one prompt and one seed"),
            ("kind", ["--quantization", "int4", "--device", "cpu"], "int4 needs a GPU"),
        ]
    )
    def test_message(self, _, arguments, message):
        """Before anything is written."""
        stderr = StringIO()
        with tempfile.TemporaryDirectory() as folder, redirect_stderr(stderr):
            given = [each.format(folder=folder, embedded=EMBEDDED_MODEL) for each in arguments]
            code = commands.main(["bench", "memory", "--model", f"{folder}/flux", "--write-random-flux", *given])
            assert not [*Path(folder).rglob("*.safetensors")]
        assert code == 2 and re.fullmatch(f"diffusers-rocm: .*{message}.*\n", stderr.getvalue()), stderr.getvalue()

    def test_what_the_pipeline_itself_refuses(self):
        stderr = StringIO()
        with redirect_stderr(stderr):
            assert commands.main(["bench", "memory", "--device", "cpu", "--max-sequence-length", "5000"]) == 1
        assert stderr.getvalue().endswith("`max_sequence_length` cannot be greater than 512 but is 5000\n"), stderr

    def test_peaks_are_of_their_stage(self):
        peaks = StagePeaks(torch.device("cpu"))
        peaks.begin("large")
        torch.ones(2**27).sum()
        peaks.begin("small")
        peaks.end()
        assert peaks.peaks["large"][1] > peaks.peaks["small"][1] + 2**28

    def test_random_pipeline(self):
        with tempfile.TemporaryDirectory() as folder:
            write_random_flux(Path(folder), SMALL, dtype=torch.float32)
            index = Path(folder, "text_encoder_2", "model.safetensors.index.json")
            assert len(json.loads(index.read_text())["weight_map"]) > 5
            for error in run_ranks(2, random_worker, folder):
                assert error <= 1e-5


if __name__ == "__main__":
    unittest.main()
