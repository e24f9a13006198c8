"""`diffusers-rocm generate` as a user runs it: pictures, their records, and one line for everything that is wrong."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from parameterized import parameterized
from PIL import Image
from safetensors.torch import load_file, save_file

from diffusers_rocm import commands
from diffusers_rocm.commands import generate as generate_command
from diffusers_rocm.pipelines.generation import file_stem
from diffusers_rocm.pipelines.model_folder import EMBEDDED_MODEL, ModelFolder

from ..testing_utils import in_process, slow


RED_CIRCLE = "a red circle on a blue background"


def run(*arguments: str | int | Path) -> subprocess.CompletedProcess:
    return in_process(lambda: commands.main(["generate", *map(str, arguments)]))


def pixels(folder: Path) -> list[np.ndarray]:
    return [np.asarray(Image.open(file)) for file in sorted(Path(folder).glob("0*.png"))]


class TestGenerate(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def test_one_seed_one_picture_on_any_number_of_ranks(self):
        prompts = self.folder / "prompts.txt"
        prompts.write_text(f"{RED_CIRCLE}\n\n  a large grün star on a yellow background  \n", encoding="utf-8")
        common = (
            "--prompt",
            "a white cross on a black background",
            "--prompts-file",
            prompts,
            "--seed",
            7,
            "--steps",
            4,
        )
        for name, mesh in {
            "1": (),
            "ring": ("--ring", 2, "--rank-check", "always"),
            "3": ("--tp", 3),
        }.items():
            sheet = self.folder / f"{name}.png"
            result = run(*common, *mesh, "--out", self.folder / name, "--contact-sheet", sheet)
            assert result.returncode == 0, result.stderr
            assert "3 picture(s)" in result.stdout and f"contact sheet: {sheet}" in result.stdout
        # One progress bar a picture, and nothing from the ranks that have none.
        assert "4/4" in result.stderr and "s/it" in result.stderr and "[rank" not in result.stdout + result.stderr
        single = pixels(self.folder / "1")
        for name in ("3", "ring"):
            pictures = pixels(self.folder / name)
            assert len(single) == len(pictures) == 3
            # A float32 difference of 1e-7 may turn the last bit of a rounded pixel.
            assert all(np.abs(a.astype(int) - b).max() <= 1 for a, b in zip(single, pictures, strict=True))
        assert np.abs(single[0].astype(int) - single[1]).max() > 50
        assert Image.open(self.folder / "3.png").width > 3 * 128

        record = json.loads(sorted((self.folder / "3").glob("*.json"))[1].read_text())
        assert record["prompt"] == RED_CIRCLE and record["seed"] == 7
        assert record["mesh"] == {"dp": 1, "cfg": 1, "ring": 1, "ulysses": 1, "tp": 3}
        assert (
            record["config"]["arguments"]["num_inference_steps"] == 4
            and record["config"]["arguments"]["height"] == 128
        )
        assert len(record["step_seconds"]) == 4 and all(second > 0 for second in record["step_seconds"])
        assert len(record["peak_memory_bytes"]) == 3 and min(record["peak_memory_bytes"]) > 1e8
        assert record["load_seconds"] > 0 and record["versions"]["torch"] == torch.__version__

    @slow
    def test_seeds_over_replicas(self):
        common = ("--prompt", RED_CIRCLE, "--prompt", "a large green star", "--steps", 2)
        for name, options in {
            "1": ("--seed", "5,6,7"),
            "dp": ("--seed", 5, "--num-images-per-prompt", 3, "--dp", 2),
        }.items():
            result = run(*common, *options, "--out", self.folder / name)
            assert result.returncode == 0 and "6 picture(s)" in result.stdout, result.stderr
        names = [file.name for file in sorted((self.folder / "1").glob("*.png"))]
        assert [name.rpartition("seed")[2] for name in names] == ["5.png", "6.png", "7.png"] * 2
        assert names == [file.name for file in sorted((self.folder / "dp").glob("*.png"))]
        single, spread = pixels(self.folder / "1"), pixels(self.folder / "dp")
        assert max(np.abs(a.astype(int) - b).max() for a, b in zip(single, spread, strict=True)) <= 1
        assert len({x.tobytes() for x in single}) == 6

    def test_under_torchrun_and_without_a_seed(self):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        command = [*launcher, "-m", "diffusers_rocm", "generate", "--prompt", RED_CIRCLE, "--tp", "2", "--steps", "2"]
        out = ["--out", str(self.folder), "--dtype", "bfloat16"]
        result = subprocess.run([*command, *out], capture_output=True, text=True, timeout=240)
        assert result.returncode == 0, result.stderr
        (file,) = self.folder.glob("*.json")
        record = json.loads(file.read_text())
        assert file.stem.endswith(f"-seed{record['seed']}") and record["config"]["dtype"] == "bfloat16"

    @slow
    def test_a_port_of_its_own(self):
        with socket.socket() as listener:
            listener.bind(("localhost", 0))
            port = listener.getsockname()[1]
        result = run("--prompt", RED_CIRCLE, "--steps", 1, "--tp", 2, "--port", port, "--out", self.folder)
        assert result.returncode == 0, result.stderr

    def lora(self) -> Path:
        """Adapters that change the picture."""
        pipe = FluxPipeline.from_pretrained(EMBEDDED_MODEL)
        from peft import LoraConfig, get_peft_model_state_dict

        targets = ["to_q", "to_out.0", "proj_out", "norm1.linear", "ff.net.2"]
        pipe.transformer.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=targets))
        torch.manual_seed(0)
        for name, parameter in pipe.transformer.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        FluxPipeline.save_lora_weights(self.folder / "lora", get_peft_model_state_dict(pipe.transformer))
        return self.folder / "lora"

    def test_lora_and_negative_prompt(self):
        plain = self.draw("plain")
        for name, arguments in {
            "negative": ("--negative-prompt", "a green star on a white background", "--guidance", "3"),
            "lora": ("--lora", self.lora()),
        }.items():
            assert np.abs(self.draw(name, *arguments) - plain).max() > 5, f"{name} changes nothing"

    @slow
    def test_lora_compiled(self):
        arguments = ("--lora", self.lora())
        compiled = self.draw("compiled", *arguments, "--compile", "--tp", 2)
        assert np.abs(compiled - self.draw("lora", *arguments)).max() <= 1

    def draw(self, name: str, *arguments: str | int | Path) -> np.ndarray:
        common = ("--prompt", RED_CIRCLE, "--seed", "0", "--steps", "1", "--height", "160", "--width", "136")
        result = run(*common, *arguments, "--out", self.folder / name)
        assert result.returncode == 0, result.stderr
        (picture,) = pixels(self.folder / name)
        return picture.astype(int)

    @slow
    def test_the_ranks_share_the_tiles_of_the_vae(self):
        encoders = ("--text-encoders", "text_encoder=first-rank", "text_encoder_2=shard")
        tiled = self.draw("tiled", "--vae-tiling", "--vae-slicing")
        shared = self.draw("tile", "--vae=tile", "--tp=2", *encoders)
        assert np.abs(shared - tiled).max() <= 1
        (record,) = (self.folder / "tile").glob("*.json")
        record = json.loads(record.read_text())
        assert record["config"]["vae"] == "tile"
        assert record["text_encoders"] == {"text_encoder": "first-rank", "text_encoder_2": "shard"}

    @slow
    def test_the_ranks_share_the_vae_or_do_not(self):
        whole = self.draw("whole")
        assert np.abs(self.draw("tiled", "--vae-tiling") - whole).max() > 3, "tiling changes nothing"
        for mode in ("first-rank", "replicate"):
            assert np.abs(self.draw(mode, "--vae", mode, "--tp=2") - whole).max() <= 1, mode

    def test_what_the_pipeline_itself_refuses(self):
        refused = "diffusers-rocm: `max_sequence_length` cannot be greater than 512 but is 5000"
        for tp in (1, 2):
            out = self.folder / "out"
            result = run("--prompt", RED_CIRCLE, "--tp", tp, "--out", out, "--max-sequence-length", 5000)
            lines = result.stderr.strip().splitlines()
            assert result.returncode == 1 and lines[-1] == refused and "Traceback" not in result.stderr, result.stderr

    def test_a_rank_with_bad_weights(self):
        model = self.folder / "model"
        shutil.copytree(EMBEDDED_MODEL, model)
        weights = model / "transformer" / "diffusion_pytorch_model.safetensors"
        tensors = load_file(weights)
        del tensors["proj_out.weight"]
        save_file(tensors, weights)
        out = self.folder / "out"
        result = run("--model", model, "--prompt", RED_CIRCLE, "--tp", 2, "--out", out, "--height", 64, "--width", 64)
        assert result.returncode == 1
        assert re.fullmatch(r"diffusers-rocm: rank \d failed: .*", result.stderr.strip().splitlines()[-1]), (
            result.stderr
        )
        assert "SIGTERM" not in result.stderr

    def test_a_config_that_leaves_things_out_means_the_defaults(self):
        model = self.folder / "model"
        shutil.copytree(EMBEDDED_MODEL, model)
        config = model / "transformer" / "config.json"
        config.write_text(json.dumps({"_class_name": "FluxTransformer2DModel"}))
        with pytest.raises(ValueError, match="--tp 25 exceeds the 24 attention heads"):
            ModelFolder(str(model)).check_degrees({"ring": 1, "ulysses": 1, "tp": 25})

    @parameterized.expand(["transformer_2", "unconditional_transformer"])
    def test_parameters_of_two_denoisers(self, second):
        model = self.folder / "model"
        shutil.copytree(EMBEDDED_MODEL, model)
        shutil.copytree(model / "transformer", model / second)
        index = json.loads((model / "model_index.json").read_text())
        (model / "model_index.json").write_text(json.dumps(index | {second: index["transformer"]}))
        one = ModelFolder(str(EMBEDDED_MODEL)).denoiser_parameters()
        assert ModelFolder(str(model)).denoiser_parameters() == 2 * one

    def test_prompt_files(self):
        file = self.folder / "prompts.txt"
        file.write_bytes("\ufeffa red circle\r\n\r\na green\u0085star\n".encode())
        args = SimpleNamespace(prompt=[], prompts_file=file)
        assert generate_command.read_prompts(args) == ("a red circle", "a green\u0085star")

    def test_the_last_seeds(self):
        args = SimpleNamespace(seed=str(2**63 - 2), num_images_per_prompt=2)
        assert generate_command.read_seeds(args) == (2**63 - 2, 2**63 - 1)

    def test_the_record_says_what_was_made(self):
        assert (
            commands.main(
                ["generate", "--prompt", RED_CIRCLE, "--seed", "0", "--steps", "2", "--height", "100", "--width", "72"]
                + ["--model", os.path.relpath(EMBEDDED_MODEL), "--out", str(self.folder)]
            )
            == 0
        )
        (file,) = self.folder.glob("*.json")
        config, image = json.loads(file.read_text())["config"], Image.open(file.with_suffix(".png"))
        assert (config["width"], config["height"]) == image.size == (72, 96)
        assert config["max_sequence_length"] == 16  # the embedded model's, by whatever path

    def test_timeout(self):
        common = ["generate", "--prompt", RED_CIRCLE, "--steps", "1", "--out", str(self.folder)]
        for arguments, minutes in (([], 10), (["--timeout", "0.5"], 0.5)):
            # It is the first thing that a rank does, and the last one here.
            with mock.patch("diffusers_rocm.pipelines.generation.init", side_effect=KeyboardInterrupt) as init:
                assert commands.main([*common, *arguments]) == 130
            init.assert_called_once_with(None, timeout=timedelta(minutes=minutes))

    def test_file_names(self):
        assert file_stem(3, "A red/circle: «grün» ../../etc", 5) == "003-a-red-circle-grün-etc-seed5"
        assert file_stem(0, "///", 1) == "000-prompt-seed1"
        assert len(file_stem(0, "word " * 100, 1)) < 80


class TestBadInput(unittest.TestCase):
    """Each of these is one line on stderr and exit code 2, before any rank is started."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        (self.folder / "latin1.txt").write_bytes("ein grüner Stern".encode("latin-1"))
        (self.folder / "empty.txt").write_text("\n \n")
        (self.folder / "prior").mkdir()
        index = {"_class_name": "FluxPipeline", "transformer": ["diffusers", "PriorTransformer"]}
        (self.folder / "prior" / "model_index.json").write_text(json.dumps(index))
        (self.folder / "list").mkdir()
        (self.folder / "list" / "model_index.json").write_text("[]")
        (self.folder / "null").mkdir()
        (self.folder / "null" / "model_index.json").write_text('{"transformer": null}')
        (self.folder / "short").mkdir()
        (self.folder / "short" / "model_index.json").write_text('{"transformer": []}')
        (self.folder / "tiny").mkdir()
        index = {"transformer": ["diffusers", "FluxTransformer2DModel"], "vae": ["diffusers", "AutoencoderTiny"]}
        (self.folder / "tiny" / "model_index.json").write_text(json.dumps(index))
        shutil.copytree(EMBEDDED_MODEL / "transformer", self.folder / "tiny" / "transformer")
        (self.folder / "sheet.png").mkdir()
        (self.folder / "broken").mkdir()
        (self.folder / "broken" / "model_index.json").write_text("{")

    def refuse(self, *arguments: str) -> str:
        from contextlib import redirect_stderr
        from io import StringIO

        stderr = StringIO()
        with redirect_stderr(stderr), mock.patch("diffusers_rocm.commands.generate.launch") as launch:
            try:
                filled = [argument.format(folder=self.folder) for argument in arguments]
                code = commands.main(["generate", "--out", f"{self.folder}/out", *filled])
            except SystemExit as error:  # argparse
                code = error.code
        assert code == 2 and not launch.called, stderr.getvalue()
        return stderr.getvalue()

    @parameterized.expand(
        [
            ("no prompt", [], "no prompt"),
            ("bad UTF-8", ["--prompts-file", "{folder}/latin1.txt"], "latin1.txt is not UTF-8"),
            ("empty file", ["--prompts-file", "{folder}/empty.txt"], "no prompt"),
            ("missing file", ["--prompts-file", "{folder}/missing.txt"], "cannot read .*missing.txt: No such file"),
            ("out is a file", ["--prompt", "x", "--out", "{folder}/empty.txt"], "cannot write to .*empty.txt"),
            ("out below a file", ["--prompt", "x", "--out", "{folder}/empty.txt/a"], "cannot write to"),
            (
                "sheet below a file",
                ["--prompt", "x", "--out", "{folder}", "--contact-sheet", "{folder}/empty.txt/a.png"],
                "cannot write to",
            ),  # fmt: skip
            ("no model", ["--prompt", "x", "--model", "{folder}/none"], "none: no model_index.json there"),
            ("not a pipeline", ["--prompt", "x", "--model", "{folder}"], "no model_index.json there"),
            (
                "no plan",
                ["--prompt", "x", "--model", "{folder}/prior", "--tp", "2"],
                "PriorTransformer has no tensor-parallel plan: a small model",
            ),
            (
                "no tiles",
                ["--prompt", "x", "--model", "{folder}/tiny", "--vae", "tile"],
                "vae='tile' does not know the tiles of AutoencoderTiny, only of AutoencoderDC, .*; use 'first-rank'",
            ),
            ("broken index", ["--prompt", "x", "--model", "{folder}/broken"], "model_index.json is not JSON"),
            ("more ranks than heads", ["--prompt", "x", "--tp", "9"], "--tp 9 exceeds the 8 attention heads"),
            ("no ranks", ["--prompt", "x", "--tp", "0"], "--tp must be at least 1; got 0"),
            ("no steps", ["--prompt", "x", "--steps", "-1"], "--steps must be at least 1; got -1"),
            ("no height", ["--prompt", "x", "--height", "0"], "--height must be at least 1"),
            (
                "too low",
                ["--prompt", "x", "--height", "7"],
                "--height must be at least 16, the pixels of one token",
            ),
            ("sheet is no PNG", ["--prompt", "x", "--contact-sheet", "{folder}/sheet"], "does not end in .png"),
            ("no such LoRA", ["--prompt", "x", "--lora", "{folder}/lora"], "lora: no such file"),
            ("huge seed", ["--prompt", "x", "--seed", "99999999999999999999"], "--seed must be from 0"),
            (
                "a seed that follows",
                ["--prompt", "x", "--seed", str(2**63 - 1), "--num-images-per-prompt", "2"],
                "--seed must be from 0",
            ),
            ("no seed", ["--prompt", "x", "--seed", "1,two"], "--seed takes a number, or some with commas"),
            ("seeds", ["--prompt", "x", "--seed", "1,2", "--num-images-per-prompt", "3"], "3, but 2 seeds: drop it"),
            ("no pictures", ["--prompt", "x", "--num-images-per-prompt", "0"], "must be at least 1; got 0"),
            ("graph", ["--prompt", "x", "--graph", "--device", "cpu"], "--graph needs a GPU"),
            (
                "guidance of cfg",
                ["--prompt", "x", "--negative-prompt", "y", "--cfg", "2", "--guidance", "1"],
                "--guidance 1.0 runs none",
            ),
            ("negative seed", ["--prompt", "x", "--seed", "-1"], "--seed must be from 0"),
            ("no number", ["--prompt", "x", "--guidance", "nan"], "--guidance must be a finite number"),
            ("index is a list", ["--prompt", "x", "--model", "{folder}/list"], "holds no names and values"),
            ("transformer is null", ["--prompt", "x", "--model", "{folder}/null"], "names no transformer"),
            ("transformer is empty", ["--prompt", "x", "--model", "{folder}/short"], "names no transformer"),
            ("empty prompt", ["--prompt", " "], "prompt 0 is empty"),
            ("prompt of bytes", ["--prompt", "a \udcff star"], "prompt 0 is not UTF-8"),
            ("sheet is a folder", ["--prompt", "x", "--contact-sheet", "{folder}/sheet.png"], "sheet.png is a folder"),
            (
                "no timeout",
                ["--prompt", "x", "--timeout", "0"],
                "--timeout must be a number of minutes above 0; got 0",
            ),
            ("endless timeout", ["--prompt", "x", "--timeout", "inf"], "--timeout must be .*; got inf"),
            ("port", ["--prompt", "x", "--port", "99999"], "99999 is not a port"),
            (
                "no branches",
                ["--prompt", "x", "--cfg", "2"],
                "--cfg 2: .* runs guidance only with a --negative-prompt",
            ),
            ("no such mode", ["--prompt", "x", "--text-encoders", "tp"], "text_encoders must be one of .*; got 'tp'"),
            (
                "no such mode of one",
                ["--prompt", "x", "--text-encoders", "text_encoder=whole"],
                "text_encoders must be one of .*; got 'whole'",
            ),
            (
                "modes without names",
                ["--prompt", "x", "--text-encoders", "shard", "text_encoder=replicate"],
                "--text-encoders takes one mode, or NAME=MODE for each; got shard text_encoder=replicate",
            ),
            ("no video", ["--prompt", "x", "--num-frames", "9"], "FluxPipeline takes no num_frames"),
            ("no GPU", ["--prompt", "x", "--quantization", "int4", "--device", "cpu"], "int4 needs a GPU; int8, "),
        ]
    )
    def test_message(self, name, arguments, message):
        stderr = self.refuse(*arguments)
        assert re.fullmatch(f"diffusers-rocm: .*{message}.*\n", stderr), stderr

    @parameterized.expand(
        [
            ("vae/config.json", 60),
            ("scheduler/scheduler_config.json", 20),
            ("transformer/diffusion_pytorch_model.safetensors", 3000),
            ("text_encoder_2/model.safetensors", 4),
        ]
    )
    def test_a_file_that_is_cut_off(self, name, length):
        """Before ranks start, and before others load what is whole."""
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(EMBEDDED_MODEL, Path(folder, "cut"))
            file = Path(folder, "cut", name)
            file.write_bytes(file.read_bytes()[:length])
            stderr = self.refuse("--prompt", "x", "--model", f"{folder}/cut")
        assert re.fullmatch(f"diffusers-rocm: .*/cut/{name} cannot be read .*: is it all there\\?\n", stderr), stderr

    def test_a_model_that_is_not_on_the_hub(self):
        with mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True):
            stderr = self.refuse("--prompt", "x", "--model", "nobody/nothing")
        assert re.fullmatch("diffusers-rocm: nobody/nothing: no model_index.json there.*\n", stderr), stderr

    def test_a_port_in_use(self):
        with socket.socket() as listener:
            listener.bind(("localhost", 0))
            listener.listen()
            stderr = self.refuse("--prompt", "x", "--tp", "2", "--port", str(listener.getsockname()[1]))
        assert re.fullmatch(r"diffusers-rocm: --port \d+: Address already in use.*\n", stderr), stderr

    def test_nonsense_for_a_number(self):
        assert "invalid int value: 'two'" in self.refuse("--prompt", "x", "--tp", "two")

    def test_torchrun_with_another_number_of_ranks(self):
        with mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="29500"):
            assert "tp=1 = 1, but 2 rank(s) were started" in self.refuse("--prompt", "x")


if __name__ == "__main__":
    unittest.main()
