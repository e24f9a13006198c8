"""`diffusers-rocm bench memory`, and the pipeline of random weights that it can write."""

import json
import re
import tempfile
import unittest
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import torch
from diffusers import FluxPipeline
from parameterized import parameterized

from diffusers_rocm import ParallelConfig, commands, load_pipeline
from diffusers_rocm.pipelines.memory import STAGES
from diffusers_rocm.pipelines.model_folder import EMBEDDED_MODEL
from diffusers_rocm.pipelines.peaks import StagePeaks
from diffusers_rocm.pipelines.random_pipeline import FLUX_DEV, write_random_flux
from diffusers_rocm.registration import DTYPE_ARGUMENT

from ..testing_utils import relative_l2, run_ranks


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


class TestBench(unittest.TestCase):
    def test_memory_of_the_embedded_model(self):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "made", "memory.json")
            output = StringIO()
            with redirect_stdout(output):
                code = commands.main(["bench", "memory", "--json", str(file), "--chart", f"{folder}/memory.png"])
            measured = json.loads(file.read_text())
            assert Path(folder, "memory.png").stat().st_size > 1000
        assert code == 0 and "one rank on CPU: peak GiB" in output.getvalue() and ", torch " in output.getvalue()
        assert re.search(r"\nweights  kept +\d\.\d\d   largest tensor +\d\.\d\d\n", output.getvalue())
        sizes = [file.stat().st_size for file in EMBEDDED_MODEL.rglob("*.safetensors")]
        # The files are in bfloat16.
        assert 1.8 * sum(sizes) < measured["weights"][0] <= 2 * sum(sizes), (measured["weights"], sizes)
        assert 0 < measured["largest_tensor"][0] < measured["weights"][0]
        assert list(measured["peaks"]) == list(STAGES)
        for stage in STAGES:
            assert measured["peaks"][stage]["device"] == [0] and measured["peaks"][stage]["host"][0] > 2**26, stage

    @parameterized.expand(
        [
            ("steps", ["--steps", "0"], "--steps must be at least 1"),
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
            given = [each.format(folder=folder) for each in arguments]
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
