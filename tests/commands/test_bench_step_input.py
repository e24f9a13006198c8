"""What `diffusers-rocm bench step` takes, and what it says where it does not."""

import importlib.util
import json
import re
import sys
import tempfile
import unittest
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from unittest import mock

from parameterized import parameterized

from diffusers_rocm import commands
from diffusers_rocm.benchmarks.step import parse_mesh
from diffusers_rocm.commands import bench_step

from .test_known_models import SMALL


FEW = ["--config", "num_layers=1", "num_single_layers=1"]


class TestBenchStepInput(unittest.TestCase):
    @parameterized.expand([("ring=2,tp=3", {"ring": 2, "tp": 3}), ("tp=2, int8", {"tp": 2, "communication": "int8"})])
    def test_mesh(self, text, wanted):
        assert parse_mesh(text) == wanted

    @parameterized.expand(
        [
            ("diffusers_rocm/assets/tiny-flux-shapes", "flux", {"num_layers": 2, "guidance_embeds": False}),
            ("black-forest-labs/FLUX.1-schnell", "flux", {"guidance_embeds": False}),
            ("black-forest-labs/FLUX.1-dev", "flux", {}),
            ("wan-1.3b", "wan", {"num_attention_heads": 12}),
            ("AuraFlowTransformer2DModel", "auraflow", {}),
        ]
    )
    def test_model_by_its_folder_or_id(self, given, name, differs):
        """Of its config only what differs from the one known by that name."""
        found, config = bench_step._model(given)
        assert found == name and config.items() >= differs.items() and "patch_size" not in config, config

    def test_a_peer(self):
        """Is installed with its own extra; what it did not run is said last, and is no failure of ours."""
        config = [f"{name}={json.dumps(value)}" for name, value in SMALL["flux"].items()]
        arguments = ["--device", "cpu", "--mesh", "tp=1", "--resolution", "64", "--compare", "cache-dit", "--config"]
        find = importlib.util.find_spec

        def run(*missing: str) -> tuple[int, str]:
            stderr, peer = StringIO(), ("cache_dit", "einops")
            spec = mock.Mock(
                side_effect=lambda name: None if name in missing else "there" if name in peer else find(name)
            )
            said_to_be = mock.patch.object(importlib.util, "find_spec", spec)
            gone = mock.patch.dict(sys.modules, {"cache_dit": None})  # which importing it finds
            with redirect_stdout(StringIO()), redirect_stderr(stderr), said_to_be, gone:
                return commands.main(["bench", "step", *arguments, *config]), stderr.getvalue()

        for name in ("cache_dit", "einops"):
            code, said = run(name)
            assert code == 2 and said.endswith(f"needs {name}: pip install 'cache-dit[parallelism]'\n"), said
        code, said = run()
        assert code == 0 and said.endswith("\nnot run: 1 of the peers' 1 rows\n"), said

    @parameterized.expand(
        [
            ("way alone", ["--mesh", "int8"], "--mesh int8 names no axis"),
            ("no ring", ["--mesh", "ulysses=2,allgather"], "allgather is a way round a ring, and there is none"),
            ("frames", ["--model", "ltx", "--mesh", "tp=2", "--frames", "6"], "6 frames: a LTXV.* makes 1 or 9"),
            ("axis", ["--mesh", "xp=2"], "'xp=2' is none of cfg=N, ring=N"),
            ("degree", ["--mesh", "tp=0"], "--mesh tp=0: tp must be at least 1; got 0"),
            ("below", ["--mesh", "tp=-1"], "--mesh tp=-1: tp must be at least 1; got -1"),
            ("nothing", ["--mesh", ","], "--mesh ,: '' is none of cfg=N"),
            (
                "float32",
                ["--mesh", "tp=1", *FEW, "--float32-reference"],
                "all rows are in float32: add --dtype bfloat16",
            ),
            ("dp", ["--mesh", "dp=2"], "--mesh dp=2: replicas exchange nothing, and each"),
            ("twice", ["--mesh", "tp=2,tp=4"], "--mesh tp=2,tp=4 names tp twice"),
            ("ranks", ["--mesh", "tp=2", "ring=3"], "are of as many ranks, and tp=2 is of 2, ring=3 is of 3"),
            ("ways", ["--mesh", "tp=2,int8,int8"], "--mesh tp=2,int8,int8 names int8 twice"),
            ("guidance", ["--mesh", "cfg=4", "--guidance"], "--mesh cfg=4: guidance is of two forwards"),
            ("options", ["--mesh", "tp=2", "--mesh", "ring=3"], "tp=2 is of 2, ring=3 is of 3"),
            ("unknown", ["--mesh", "tp=2", "--config", "foo=3"], "FluxTransformer2DModel cannot be had with .*foo"),
            (
                "negative",
                ["--mesh", "tp=2", "--config", "num_layers=-1"],
                "num_layers=-1: ValueError: fewer than none",
            ),
            (
                "no blocks",
                ["--mesh", "tp=2", "--config", "num_layers=0", "num_single_layers=0"],
                "num_layers=0, num_single_layers=0: ValueError: no blocks are left",
            ),
            ("no heads", ["--mesh", "tp=2", "--config", "num_attention_heads=0"], "ValueError: no heads are left"),
            (
                "model",
                ["--mesh", "tp=2", "--model", "wam"],
                "wam: there is no such folder, .* short names like it are wan",
            ),
            ("another", ["--mesh", "tp=2", "--model", "no"], "no: there is no such folder, .* short names are flux, "),
            ("no step", ["--mesh", "tp=2", "--model", "UNet2DModel"], "what a UNet2DModel is given in a step is not"),
            ("no text", ["--mesh", "tp=2", "--model", "dit", "--text", "7"], "takes no text: leave out --text"),
            (
                "memory",
                ["--mesh", "tp=64"],
                "64 ranks of 47.6 GB each, .* num_layers=1 num_single_layers=1, say",
            ),
            ("memory of another", ["--mesh", "tp=64", "--model", "z-image"], "n_layers=1 n_refiner_layers=1, say"),
            ("peer", ["--mesh", "tp=1", *FEW, "--compare", "diffusers"], "--compare diffusers runs on GPUs"),
            ("none", [], "there are no GPUs to take all of: give --mesh tp=2"),
            ("cfg", ["--mesh", "cfg=2", *FEW], "add --guidance"),
            ("graph", ["--mesh", "tp=1", *FEW, "--mode", "compile+graph"], r"--mode compile\+graph needs a GPU"),
            ("device map", ["--mesh", "tp=1", *FEW, "--compare", "device-map"], "--compare device-map runs on GPUs"),
            (
                "no peer",
                ["--mesh", "tp=1", *FEW, "--compare", "cache-dot,diffusers"],
                "cache-dot: there are diffusers",
            ),
            ("resolution", ["--mesh", "tp=2", "--resolution", "100"], "a height of 100 is no multiple of 16"),
            ("repeats", ["--mesh", "tp=2", "--repeats", "0"], "--repeats must be at least 1"),
            ("config", ["--mesh", "tp=2", "--config", "layers"], "write NAME=VALUE"),
            ("chart", ["--mesh", "tp=1", *FEW, "--chart", "chart.jpg"], "--chart (needs matplotlib|writes a PNG)"),
            ("json", ["--mesh", "tp=1", *FEW, "--json", "{folder}"], "is a folder"),
            ("no file", ["--mesh", "tp=1", *FEW, "--chart", "{folder}"], "is a folder"),
        ]
    )
    def test_message(self, _, arguments, message):
        stderr = StringIO()
        with tempfile.TemporaryDirectory() as folder, redirect_stderr(stderr):
            given = [each.format(folder=folder) for each in arguments]
            code = commands.main(["bench", "step", "--device", "cpu", *given])
        assert code == 2 and re.fullmatch(f"diffusers-rocm: .*{message}.*\n", stderr.getvalue()), stderr.getvalue()


if __name__ == "__main__":
    unittest.main()
