"""`diffusers-rocm plan`."""

import json
import logging
import re
import shutil
import sys
import tempfile
import unittest
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest import mock

import huggingface_hub.constants
import torch
from diffusers import FluxTransformer2DModel
from hypothesis import given, settings
from hypothesis import strategies as st
from parameterized import parameterized
from torch import nn

from diffusers_rocm import commands
from diffusers_rocm.models.plans.verify import verify_plan
from diffusers_rocm.pipelines.model_folder import EMBEDDED_MODEL


TINY = ["plan", "--model", str(EMBEDDED_MODEL), "--resolution", "64", "--text", "32", "--gpu", "7800 XT"]


def plan(*arguments: str) -> tuple[int, str, str]:
    output, errors = StringIO(), StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        try:
            code = commands.main([*TINY, *arguments])
        except SystemExit as error:  # of argparse
            code = error.code
    return code, output.getvalue(), errors.getvalue()


class TestPlan(unittest.TestCase):
    @parameterized.expand([(False,), (True,)])
    def test_explain(self, explain):
        code, text, _ = plan("--tp", "4", *(["--explain"] if explain else []))
        assert code == 0 and "FluxTransformer2DModel, tp=4: at most " in text, text
        assert ("replicated on every rank" in text and "time_text_embed" in text) == explain
        assert "matches nothing" not in text and "without a rule" not in text

    def test_explain_what_is_quantised(self):
        """A byte for each weight of a Linear, and all else as it was."""
        code, text, _ = plan("--gpus", "2", "--dtype", "int8", "--explain")
        assert code == 0 and "FluxTransformer2DModel, tp=" in text, text
        with torch.device("meta"):
            model = FluxTransformer2DModel.from_config(
                FluxTransformer2DModel.load_config(EMBEDDED_MODEL / "transformer")
            )
        weights = sum(x.weight.numel() for x in model.modules() if isinstance(x, nn.Linear))
        whole, int8 = (verify_plan(model.bfloat16(), 2, each) for each in (None, 1.01))
        assert abs(whole.full_bytes - int8.full_bytes - 0.99 * weights) <= 1
        assert max(int8.rank_bytes) < 0.6 * max(whole.rank_bytes)
        code, text, _ = plan("--gpus", "4", "--tp", "4", "--explain")
        assert code == 0 and "FluxTransformer2DModel, tp=4:" in text, text

    def test_the_hook_for_errors_is_as_it_was(self):
        """torch puts a rank's name before every line, once more for each group that it makes."""
        hook = sys.excepthook
        plan("--gpus", "2")
        assert sys.excepthook is hook

    def test_what_is_never_made_is_said(self):
        _, text, _ = plan("--gpus", "2", "--nodes", "2", "--memory", "16GB")
        assert "cfg=2: a step is one forward, without guidance" in text, text
        assert "tp>2: its sums in every layer would go between nodes" in text, text
        assert "--nnodes 2 --node-rank RANK --master-addr HOST" in text, text

    @parameterized.expand(
        [
            ("list", "transformer/config.json", "[1]", "its transformer/config.json holds no names and values"),
            ("vae", "vae/config.json", "[]", "its vae/config.json holds no names and values"),
            ("no heads", "transformer/config.json", {"num_attention_heads": 0}, "cannot be had with"),
            ("negative", "transformer/config.json", {"num_attention_heads": -3}, "cannot be had with"),
            ("word", "transformer/config.json", {"num_attention_heads": "many"}, "num_attention_heads='many'"),
            ("nan", "transformer/config.json", {"num_attention_heads": float("nan")}, "num_attention_heads=nan"),
            ("dims", "transformer/config.json", {"axes_dims_rope": [1, 2]}, "axes_dims_rope=[1, 2]"),
            ("channels", "vae/config.json", {"block_out_channels": "abc"}, "AutoencoderKL cannot be had with"),
            ("hidden", "text_encoder/config.json", {"hidden_size": -1}, "CLIPTextModel cannot be had with"),
        ]
    )
    def test_a_broken_folder_is_one_line(self, _, name, content, said):
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(shutil.copytree(EMBEDDED_MODEL, Path(parent, "model")))
            if isinstance(content, dict):
                content = json.dumps(json.loads((folder / name).read_text()) | content)
            (folder / name).write_text(content)
            answers = [plan("--gpus", "2", "--model", str(folder))]
            answers += [plan("--tp", "2", "--model", str(folder))] * ("num_attention_heads=" in said)
        for code, text, errors in answers:
            assert code == 2 and said in errors and errors.count("\n") == 1 and not text, errors

    def test_a_config_that_does_not_name_its_class(self):
        """The index names it: a mesh is found, and is explained."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name, "model")
            shutil.copytree(EMBEDDED_MODEL, folder)
            file = folder / "transformer" / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {"_class_name": None}))
            code, output, _ = plan("--model", str(folder), "--gpus", "2", "--gpu", "7800 XT", "--explain")
        assert code == 0 and "replicated" in output, output

    def test_the_hub_is_asked_in_silence(self):
        with mock.patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True):
            code, _, errors = plan("--model", "nobody/nothing", "--gpus", "2")
        assert code == 2 and "nobody/nothing: no model_index.json there" in errors and errors.count("\n") == 1, errors
        assert not logging.getLogger("huggingface_hub.utils._http").isEnabledFor(logging.WARNING)

    def test_a_class_that_diffusers_lacks(self):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "model_index.json").write_text('{"transformer": ["diffusers", "NoSuchModel"]}')
            for meshes in (("--tp", "2"), ("--tp", "2", "--explain"), ("--gpus", "2")):
                code, text, errors = plan("--model", folder, *meshes)
                assert code == 2 and "its NoSuchModel is" in errors and errors.count("\n") == 1, errors

    def test_meshes(self):
        code, text, _ = plan("--gpus", "2", "--memory", "16GB", "--link", "12GB/s", "--explain")
        assert code == 0 and "2 x RX 7800 XT (speed assumed from its data sheet) with 16.0 GB, 12 GB/s" in text, text
        for mesh in ("tp=2", "ulysses=2", "ring=2 (p2p)", "one GPU, if it had room"):
            assert f"\n{mesh}" in text
        assert "allgather" not in text
        assert "diffusers-rocm generate --model" in text and "at most 0.0" in text

    @parameterized.expand(
        [
            ("bfloat16", ""),
            ("float16", " --dtype float16"),
            ("int8", " --quantization int8"),
            ("int4", " --quantization int4"),
        ]
    )
    def test_the_command_computes_as_it_was_counted(self, dtype, said):
        code, text, _ = plan("--gpus", "2", "--dtype", dtype)
        (command,) = (line for line in text.splitlines() if line.startswith("diffusers-rocm generate"))
        assert code == 0 and re.search(rf"--(ulysses|ring|tp) 2{said} --compile", command), text
        assert ("dequantising is not counted" in text) == dtype.startswith("int"), text

    def test_the_command_decodes_as_it_was_counted(self):
        """At once it takes 40 MB, and 4 in tiles."""
        for memory, tiled in (("1030MB", True), ("1050MB", False)):
            given = "--gpus", "2", "--resolution", "512", "--memory", memory
            code, text, _ = plan(*given)
            (command,) = (line for line in text.splitlines() if line.startswith("diffusers-rocm generate"))
            assert code == 0 and ("--vae-tiling" in command) == ("one tile at a time" in text) == tiled, text
            _, text, _ = plan(*given, "--json")
            assert {each["vae_tiling"] for each in json.loads(text)["meshes"]} == {tiled}

    def test_a_sign_of_life(self):
        with mock.patch.object(commands.plan, "PATIENCE", 0):
            code, text, errors = plan("--gpus", "2", "--json")
        assert code == 0 and json.loads(text) and "still looking" in errors and errors.count("\n") == 1, errors
        assert "still looking" not in plan("--gpus", "2")[2]

    def test_json(self):
        code, text, _ = plan("--gpus", "4", "--memory", "1.0045GB", "--json")
        found = json.loads(text)
        steps = [each["step"] for each in found["meshes"]]
        assert code == 0 and steps == sorted(steps) and found["one GPU"] > 0
        for each in found["meshes"]:
            assert max(each["memory"].values()) <= 4.5e6
        assert found["dropped"] and all(each["reason"] for each in found["dropped"])

    def test_nothing_fits(self):
        for arguments, said in (
            (("--memory", "1100MB", "--text", "99999"), "less --text, or more GPUs"),
            (("--memory", "1002MB"), "fewer --frames, or GPUs of more memory"),
        ):
            code, text, _ = plan("--gpus", "2", *arguments)
            assert code == 1 and "nothing fits; " in text and text.endswith(f"{said}\n"), text

    @parameterized.expand(
        [
            (("--gpus", "2", "--memory", "16XB"), "--memory 16XB: write 16GB"),
            (("--gpus", "2", "--memory", "1GB"), "are the driver's"),
            (("--gpus", "2", "--link", "0GB/s"), "--link 0GB/s: write 16GB/s"),
            (("--gpus", "2", "--link", "12GB"), "--link 12GB: write"),
            (("--gpus", "2", "--dtype", "float32"), "are of 16 bits, and float32 is several times slower"),
            (("--gpus", "2", "--memory", "9" * 400 + "GB"), "9GB: write 16GB"),
            (("--gpus", "100000000"), "--gpus must be at most 4096; got 100000000"),
            (("--gpus", "512", "--nodes", "9"), "--nodes 9 of 512 GPUs each: plan for at most 4096 in all"),
            (("--gpus", "2", "--text", "9" * 100), "--text must be at most 1000000"),
            (("--gpus", "2", "--model", "wan", "--frames", "4" + "0" * 20 + "1"), "--frames must be at most 10000"),
            (("--gpus", "0"), "--gpus must be at least 1; got 0"),
            (("--nodes", "-1", "--gpus", "2"), "--nodes must be at least 1; got -1"),
            (("--gpus", "2", "--resolution", "100"), "no multiple of 16"),
            (("--gpus", "2", "--gpu", "Voodoo 3"), "--gpu Voodoo 3: unknown; there are"),
            (("--gpus", "2", "--gpu", "7900"), "which of RX 7900 XTX, RX 7900 XT"),
            (("--gpus", "2", "--gpu", "H200", "--measure"), "--measure measures the GPUs that are here"),
            (("--gpus", "2", "--tp", "2"), "--tp with --gpus is for --explain"),
            (("--gpus", "2", "--tp", "4", "--explain"), "no mesh of nodes of 2 GPUs has it; use a divisor of 2"),
            (("--gpus", "18", "--tp", "9", "--explain"), "tp=9 exceeds the 8 attention heads"),
            (("--tp", "9"), "tp=9 exceeds the 8 attention heads"),
            (("--model", "./no-such", "--gpus", "2"), "./no-such: no model_index.json there"),
            (("--model", "no-such", "--gpus", "2"), "no-such: there is no such folder, and ids on the Hub are OWNER/"),
            (
                ("--model", "fluxx", "--gpus", "2"),
                "ids on the Hub are OWNER/NAME; short names like it are flux, ",
            ),
            (("--model", "FLUX.1-dev", "--tp", "2"), "short names are flux, "),
            (("--gpus", "2", "--frames", "5"), "5 frames: a FluxTransformer2DModel makes pictures"),
            (("--gpus", "2", "--model", "wan", "--resolution", "480", "--frames", "4"), "makes 1 or 5"),
        ]
    )
    def test_bad_input_is_one_line(self, arguments, said):
        code, text, errors = plan(*arguments)
        assert code == 2 and said in errors and errors.count("\n") == 1 and not text, errors

    @settings(max_examples=60, deadline=None)
    @given(st.sampled_from(["--memory", "--link", "--internode", "--gpu", "--gpus", "--nodes", "--frames"]), st.text())
    def test_nonsense_is_no_traceback(self, flag, value):
        # What is fine goes no further than the next argument, which is not.
        code, _, errors = plan("--gpus", "2", flag, value, "--resolution", "100")
        assert code == 2 and "Traceback" not in errors


if __name__ == "__main__":
    unittest.main()
