"""`diffusers-rocm validate`."""

import json
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest import mock

import psutil
import torch
from parameterized import parameterized

from diffusers_rocm import commands
from diffusers_rocm.commands import validate
from diffusers_rocm.commands.validate import JSON, Step
from diffusers_rocm.distributed import choices
from diffusers_rocm.distributed.axis import Axis
from diffusers_rocm.distributed.choices import Busy

from ..testing_utils import slow


class TestValidate(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.out = Path(folder.name)

    def validate(self, *arguments: str) -> tuple[int, str, list[dict], str]:
        """Exit code, what was printed, and the two reports."""
        output = StringIO()
        with redirect_stdout(output):
            code = commands.main(["validate", "--device", "cpu", "--out", str(self.out), *arguments])
        report = self.out / "report"
        steps = json.loads(report.with_suffix(".json").read_text())
        return code, output.getvalue(), steps, report.with_suffix(".md").read_text()

    def validate_these(self, taken: list[Step], *arguments: str) -> tuple[int, str, list[dict], str]:
        with mock.patch.object(validate, "steps", return_value=taken):
            return self.validate(*arguments)

    def test_what_fails_does_not_hide_what_comes_after_it(self):
        tiny = ["num_layers=1", "num_single_layers=1", "num_attention_heads=2", "attention_head_dim=16"]
        tiny += ["joint_attention_dim=8", "pooled_projection_dim=8", "axes_dims_rope=[4,6,6]"]
        small = ["--resolution", "64", "--text", "8", "--device", "cpu", "--repeats", "1", "--rounds", "1"]
        code, printed, steps, page = self.validate_these(
            [
                Step("What this machine is", ["env", "--json"]),
                Step("Fails", ["bench", "step", "--mesh", "tp=0", *small]),
                Step("Works", ["bench", "step", "--mesh", "tp=1", *small, "--json", JSON, "--config", *tiny]),
            ]
        )
        assert code == 1 and "2 of 3 passed" in printed, printed
        assert [step["code"] for step in steps] == [0, 2, 0]
        assert steps[0]["results"]["packages"]["torch"] and steps[2]["results"]["rows"][0]["name"] == "one rank"
        assert "--mesh tp=0" in steps[1]["said"]
        for line in ("| Fails | FAILED (exit code 2)", "| Works | passed", "relative L2"):
            assert line in page, page
        assert "results.json" not in page and JSON not in page

    def test_what_is_wrong_is_told(self):
        step = Step("What is wrong with it", ["doctor", "--device", "cpu", "--json"])
        wrong = '{"findings": [{"status": "problem", "name": "clock", "seen": "it stands", "fix": "wind it up"}]}'
        code = f"import sys; print({wrong!r}); print('a warning of an import', file=sys.stderr); sys.exit(1)"
        doctor = mock.Mock(
            return_value=subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=-1, text=True)
        )
        with mock.patch.object(subprocess, "Popen", doctor):
            code, printed, _, page = self.validate_these([step])
        for text in (printed, page):
            assert "problem  clock                  it stands; fix: wind it up" in text, text
        assert code == 1 and "a warning of an import" in page and "a warning of an import" not in printed

    def test_what_hangs_is_given_up(self):
        endless = Step("Hangs", ["generate", "--prompt", "a red circle", "--steps", "90000", "--out", str(self.out)])
        code, printed, steps, page = self.validate_these([endless], "--timeout", "10")
        assert code == 1 and "0 of 1 passed" in printed and "| Hangs | did not end" in page, page
        assert steps[0]["code"] is None and 10 <= steps[0]["seconds"] < 60

    def test_its_steps_end_with_it(self):
        command = [sys.executable, "-m", "diffusers_rocm", "validate", "--device", "cpu", "--out", str(self.out)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            process.stdout.read(1)  # the first step has begun
            deadline = time.monotonic() + 60
            while not (children := psutil.Process(process.pid).children(recursive=True)):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            process.terminate()
            assert process.wait(60) == 128 + signal.SIGTERM
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive, alive

    def test_meshes(self):
        assert validate.meshes(1) == []
        assert validate.meshes(2) == ["tp=2", "ulysses=2", "ring=2", "ring=2,allgather"]
        found = validate.meshes(4)
        assert len(found) == len(set(found)) == 7 and "ring=2,ulysses=2" in found and "ulysses=2,tp=2" in found

    @parameterized.expand([(2,), (4,), (8,)])
    def test_a_ring_of_gpus_hops(self, gpus):
        """In one of the steps, on the largest of GPUs; and what comes of it is compared with float32."""
        request = validate.ValidateRequest(gpus, True, self.out)
        step = next(step for step in validate.steps(request, False) if step.title.startswith("Tensors of flux"))
        assert "--float32-reference" in step.arguments and f"ring={gpus}" in step.arguments
        side = int(step.arguments[step.arguments.index("--resolution") + 1])
        tokens = (side // 16) ** 2 // gpus
        with mock.patch.object(choices, "_busy", lambda *_: Busy.of_gpu(304)):
            where = torch.device("cuda"), Axis.single("ring")
            assert choices.hides_a_hop(24 * tokens, tokens, 128, *where)
            assert not choices.hides_a_hop(24 * tokens * 9 // 10, tokens * 9 // 10, 128, *where)

    @parameterized.expand(
        [
            (("--gpus", "0"), "--gpus must be at least 1; got 0"),
            (("--timeout", "1"), "--timeout must be from 10"),
            (("--out", "/proc/nowhere"), "cannot write to /proc/nowhere"),
        ]
    )
    def test_bad_input_is_one_line(self, arguments, said):
        errors = StringIO()
        with redirect_stderr(errors):
            code = commands.main(["validate", "--device", "cpu", "--out", str(self.out), *arguments])
        assert code == 2 and said in errors.getvalue() and errors.getvalue().count("\n") == 1

    @slow
    def test_this_machine(self):
        code, printed, steps, page = self.validate("--quick")
        assert code == 0 and len(steps) == 4, printed + page
        pictures, tensors = (step["results"]["rows"] for step in steps[2:])
        meshes = len(validate.meshes(2))
        assert len(pictures) == 1 + meshes and all(row["distance"] < 1e-3 for row in pictures)
        assert len(tensors) == 1 + meshes + 3 and not any(row["note"] for row in tensors)
        assert all((row["distance"] < 1e-4) == ("int8" not in row["name"]) for row in tensors)


if __name__ == "__main__":
    unittest.main()
