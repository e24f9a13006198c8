"""The wheel and the sdist: all that the package needs is in them, and little else."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest
import zipfile
from pathlib import Path

from PIL import Image

from .testing_utils import slow


ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "diffusers_rocm"
SOURCES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
MOST = 10e6  # bytes


def build(source: Path, kind: str, out: Path) -> Path:
    """By setuptools, as `python -m build` and pip do it, with the setuptools that is here."""
    code = f"import sys, setuptools.build_meta as backend; print(backend.build_{kind}(sys.argv[1]))"
    result = subprocess.run([sys.executable, "-c", code, str(out)], cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return out / result.stdout.splitlines()[-1]


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


class TestPackaging(unittest.TestCase):
    @slow
    def test_what_is_built_draws_a_picture(self):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            source, installed = folder / "source", folder / "installed"
            source.mkdir()
            for each in SOURCES:
                shutil.copy(ROOT / each, source)
            shutil.copytree(PACKAGE, source / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
            sdist, wheel = build(source, "sdist", folder), build(source, "wheel", folder)
            assert max(sdist.stat().st_size, wheel.stat().st_size) < MOST

            with tarfile.open(sdist) as archive:
                archive.extractall(folder / "unpacked", filter="data")
            (unpacked,) = (folder / "unpacked").iterdir()
            from_sdist = build(unpacked, "wheel", folder / "unpacked")
            files = {str(each.relative_to(ROOT)) for each in PACKAGE.rglob("*") if each.is_file()}
            wanted = {each for each in files if "__pycache__" not in each}
            assert contents(wheel) == contents(from_sdist) == wanted

            with zipfile.ZipFile(from_sdist) as archive:
                archive.extractall(installed)
            words = ["generate", "--tp", "2", "--prompt", "a red circle", "--seed", "0", "--steps", "2"]
            command = [sys.executable, "-m", "diffusers_rocm", *words, "--height", "64", "--width", "64"]
            options = {"cwd": folder, "env": {**os.environ, "PYTHONPATH": str(installed)}, "capture_output": True}
            result = subprocess.run(command, **options, text=True)
            assert result.returncode == 0, result.stderr
            (picture,) = (folder / "outputs").rglob("*.png")
            assert Image.open(picture).size == (64, 64)
            assert json.loads(picture.with_suffix(".json").read_text())["mesh"]["tp"] == 2
            code = "import diffusers_rocm; print(diffusers_rocm.__file__)"
            found = subprocess.run([sys.executable, "-c", code], **options, text=True)
            assert found.stdout.strip() == str(installed / "diffusers_rocm" / "__init__.py"), found
            (scripts,) = installed.glob("*.dist-info/entry_points.txt")
            assert "diffusers-rocm = diffusers_rocm.commands:main" in scripts.read_text()


if __name__ == "__main__":
    unittest.main()
