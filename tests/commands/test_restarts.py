"""`generate --restarts`: a rank that dies costs its picture, not those before it."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

import numpy as np
import psutil
from PIL import Image

from diffusers_rocm import commands
from diffusers_rocm.pipelines.outputs import file_stem, first_frame, whole_file, write, written

from ..testing_utils import in_process, slow


COLOURS = ("red", "green", "blue", "white", "yellow")
PROMPTS = [f"a {colour} {shape}" for colour in COLOURS for shape in ("circle", "star", "cross", "square")]


def arguments(out: Path, *options: str) -> list[str]:
    size = ["--height", "64", "--width", "64", "--steps", "2", "--seed", "3"]
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    return ["generate", *prompts, *size, "--out", str(out), *options]


def rank_process(launcher: int, rank: int) -> psutil.Process:
    def is_it(process: psutil.Process) -> bool:
        try:
            return process.environ().get("RANK") == str(rank)
        except psutil.Error:
            return False

    return next(process for process in psutil.Process(launcher).children(recursive=True) if is_it(process))


def pictures(folder: Path) -> dict[str, np.ndarray]:
    return {file.name: np.asarray(Image.open(file)) for file in sorted(folder.glob("*.png"))}


class TestRestarts(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def start(self, out: Path, *options: str) -> subprocess.Popen:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen([sys.executable, "-m", "diffusers_rocm", *arguments(out, *options)], **pipes)
        self.addCleanup(process.terminate)  # and with it, its ranks
        return process

    def wait_for_pictures(self, process: subprocess.Popen, folder: Path, count: int) -> None:
        deadline = time.monotonic() + 200
        while len(list(folder.glob("*.json"))) < count:
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.01)

    def test_a_rank_is_killed_in_the_middle_of_20_prompts(self):
        self.check_restart(("--dp", "2"), victim=1, calm=())  # replicas draw what one process does

    @slow
    def test_a_rank_of_two_shards_is_killed(self):
        self.check_restart(("--tp", "2"), victim=0, calm=("--tp", "2"))

    def check_restart(self, mesh: tuple[str, ...], victim: int, calm: tuple[str, ...]) -> None:
        undisturbed, shaken = self.folder / "calm", self.folder / "shaken"
        reference = in_process(lambda: commands.main(arguments(undisturbed, *calm)))
        assert reference.returncode == 0, reference.stderr

        sheet = self.folder / "sheet.png"
        process = self.start(shaken, *mesh, "--restarts", "2", "--contact-sheet", str(sheet))
        self.wait_for_pictures(process, shaken, 6)
        made_at = {file.name: file.stat().st_mtime_ns for file in shaken.glob("*.json")}
        rank_process(process.pid, victim).kill()
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        assert re.search(r"^\d+ of 20 are in .*shaken/ since before the restart$", out, re.M), out
        assert "20 picture(s) in" in out and "exitcode: -9" in err, (out, err)

        wanted, found = pictures(undisturbed), pictures(shaken)
        assert list(wanted) == list(found) and len(found) == 20
        assert all(np.array_equal(wanted[file], found[file]) for file in wanted)
        assert len({picture.tobytes() for picture in found.values()}) == 20
        # Each once: what was there when the rank died is as it was.
        assert all((shaken / file).stat().st_mtime_ns == at for file, at in made_at.items())
        assert not [file for file in os.listdir(shaken) if not file.endswith((".png", ".json"))]
        assert Image.open(sheet).height > Image.open(sheet).width  # 20 pictures, in 4 columns

    @slow
    def test_no_restart_without_asking_and_not_more_than_asked(self):
        process = self.start(self.folder, "--dp", "2", "--restarts", "1")
        for attempt in (1, 2):
            self.wait_for_pictures(process, self.folder, 2 * attempt)
            rank_process(process.pid, 1).send_signal(signal.SIGKILL)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 1
        assert err.strip().splitlines()[-1] == "diffusers-rocm: rank 1 was killed by SIGKILL (out of host memory?)", (
            err
        )


class TestOutputs(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def test_what_counts_as_written(self):
        stem, image = self.folder / file_stem(0, "a red circle", 5), Image.new("RGB", (8, 8), "red")
        assert written(stem, 1.5) is None
        file = write(image, {"started": 1.5}, stem, fps=16)
        assert written(stem, 1.5) == file and first_frame(file).getpixel((0, 0)) == (255, 0, 0)
        assert written(stem, 2.5) is None  # that of an earlier run is made again
        file.unlink()
        assert written(stem, 1.5) is None
        assert json.loads(stem.with_suffix(".json").read_text()) == {"started": 1.5}

    def test_a_video_too(self):
        frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "blue", "blue", "blue", "blue")]
        file = write(frames, {"started": 1.5}, self.folder / "000-clip-seed0", fps=16)
        assert file.suffix == ".mp4" and written(self.folder / "000-clip-seed0", 1.5) == file
        red, _, blue = first_frame(file).getpixel((16, 16))
        assert red > 200 and blue < 60

    def test_a_file_is_there_whole_or_not_at_all(self):
        file = self.folder / "record.json"
        file.write_text("before")
        with self.assertRaises(RuntimeError), whole_file(file) as partial:
            partial.write_text("ha")
            raise RuntimeError("the disk is full")
        assert file.read_text() == "before"


if __name__ == "__main__":
    unittest.main()
