"""The scripts of utils/ that measure on GPUs, as small as they go, on CPUs."""

import json
import runpy
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from parameterized import parameterized

from .testing_utils import in_process, require_torch_accelerator, slow_unless


UTILS = Path(__file__).parents[1] / "utils"
TINY = [f"{name}=1" for name in ("num_layers", "num_single_layers")]
TINY += ["num_attention_heads=2", "joint_attention_dim=32", "pooled_projection_dim=16"]
SMALL = ["--resolution", "256", "--repeats", "1", "--steps", "2"]
KERNELS = ["--mesh", "ulysses=2", "--resolution", "64", "--repeats", "1", "--config", *TINY]
EAGER = ["--device", "cpu", "--mode", "eager"]


class TestScripts(unittest.TestCase):
    @parameterized.expand(
        [
            ("attention", 2, "--out", ["--tokens", "64", "--heads", "2", "--repeats", "1", "--dtype", "float32"]),
            ("collectives", 2, "--out", ["--image", "64", "--text", "16", "--width", "64", "--hop", "16"]),
            ("overlap", 2, "--out", ["--rows", "64", "--sums", "64", "--width", "64", "--no-symmetric"]),
            ("guard", 2, "--out", ["--tp", "2", "--double", "1", "--single", "1", "--width", "256", *SMALL]),
            ("kernels", 2, "--json", [*EAGER, *KERNELS]),
            ("kernels", 1, "--json", ["--alone", "--gelu-apart", *EAGER, *KERNELS]),
        ]
    )
    def test_run(self, name, ranks, out, arguments):
        slow_unless("--alone" in arguments)
        self.check_run(name, ranks, out, arguments)

    @require_torch_accelerator
    def test_run_of_graphs(self):
        self.check_run("kernels", 1, "--json", ["--alone", "--mode", "graph", *KERNELS])

    def check_run(self, name: str, ranks: int, out: str, arguments: list[str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            launch = [] if ranks == 1 else ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--standalone"]
            file = Path(folder, "run.json")
            command = [sys.executable, *launch, UTILS / f"bench_{name}.py", *arguments, out, file]
            run = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=240)
            assert run.returncode == 0, run.stderr[-3000:]
            written = json.loads(file.read_text())
        assert written["versions"]["torch"] and len(written) > 1, written

    @parameterized.expand(
        [
            ("kernels", ["--alone", "--device", "cpu", "--mesh", "foo"], "--mesh foo: 'foo' is none of cfg=N"),
            ("kernels", ["--alone", "--device", "cpu", "--resolution", "7"], "a height of 7 is no multiple of 16"),
            (
                "kernels",
                ["--alone", "--device", "cpu", "--config", "foo=1"],
                "FluxTransformer2DModel cannot be had with",
            ),
            ("kernels", ["--alone", "--device", "cpu"], "--mode compile+graph needs a GPU: give --mode eager"),
            ("kernels", ["--device", "cpu", "--mode", "eager"], "no ranks: start it by torchrun --nproc_per_node=2 "),
            ("kernels", ["--json", "{folder}"], "is a folder, or in none that exists"),
            ("attention", ["--dtype", "foo"], "--dtype: invalid choice: 'foo'"),
            ("attention", ["--tokens", "0"], "--tokens: 0 is not a number of at least 1"),
            ("overlap", [], "no ranks: start it by torchrun --nproc_per_node=2 "),
            *(
                (name, ["--repeats", "0"], "--repeats: 0 is not a number of at least 1")
                for name in ("attention", "collectives", "guard", "host_memory", "kernels", "overlap")
            ),
        ]
    )
    def test_message(self, name, arguments, message):
        """In the last line, which is no traceback's."""
        script = str(UTILS / f"bench_{name}.py")

        def main() -> int | str | None:
            with mock.patch.object(sys, "argv", [script, *(each.format(folder=UTILS) for each in arguments)]):
                with mock.patch.object(sys, "path", [str(UTILS), *sys.path]):
                    try:
                        runpy.run_path(script, run_name="__main__")
                    except SystemExit as end:
                        return end.code
            return 0

        run = in_process(main)  # a code that is text is what Python itself would print
        said = [*run.stderr.splitlines(), *([run.returncode] if isinstance(run.returncode, str) else [])]
        assert run.returncode and message in said[-1] and "Traceback" not in run.stderr, run


if __name__ == "__main__":
    unittest.main()
