"""The wheel and the sdist: all that the package needs is in them, and little else."""

import ast
import json
import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
import unittest
import venv
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


def environment(folder: Path) -> Path:
    """An environment with nothing in it, that sees what is installed here, but no package in place of its sources."""
    venv.create(folder, with_pip=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "here.pth").write_text("\n".join(site.getsitepackages()))
    return folder / "bin"


class TestPackaging(unittest.TestCase):
    @slow
    def test_what_is_built_draws_a_picture(self):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            source = folder / "source"
            source.mkdir()
            for each in SOURCES:
                shutil.copy(ROOT / each, source)
            shutil.copytree(PACKAGE, source / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
            sdist, wheel = build(source, "sdist", folder), build(source, "wheel", folder)
            assert max(sdist.stat().st_size, wheel.stat().st_size) < MOST

            shutil.unpack_archive(sdist, folder / "unpacked")
            (unpacked,) = (folder / "unpacked").iterdir()
            from_sdist = build(unpacked, "wheel", folder / "unpacked")
            files = {str(each.relative_to(ROOT)) for each in PACKAGE.rglob("*") if each.is_file()}
            wanted = {each for each in files if "__pycache__" not in each}
            assert contents(wheel) == contents(from_sdist) == wanted

            installed = environment(folder / "environment")
            pip = [installed / "pip", "install", "--quiet", "--no-deps", "--ignore-installed", from_sdist]
            options = {"cwd": folder, "env": {**os.environ, "PYTHONPATH": ""}, "capture_output": True, "text": True}
            result = subprocess.run(pip, **options)
            assert result.returncode == 0, result.stderr
            words = ["generate", "--tp", "2", "--prompt", "a red circle", "--seed", "0", "--steps", "2"]
            command = [installed / "diffusers-rocm", *words, "--height", "64", "--width", "64"]
            result = subprocess.run(command, **options)
            assert result.returncode == 0, result.stderr
            (picture,) = (folder / "outputs").rglob("*.png")
            assert Image.open(picture).size == (64, 64)
            assert json.loads(picture.with_suffix(".json").read_text())["mesh"]["tp"] == 2
            code = "import diffusers_rocm; print(diffusers_rocm.__file__)"
            found = subprocess.run([installed / "python", "-c", code], **options)
            assert str(folder / "environment") in found.stdout, found

    def test_what_is_imported_is_installed(self):
        optional = {"cache_dit", "matplotlib", "peft", "torchao", "triton"}  # each where it is found, or asked for
        imported = set()
        for file in PACKAGE.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    imported.add(node.module.partition(".")[0])
        needed = imported - set(sys.stdlib_module_names) - optional - {PACKAGE.name}
        (listed,) = re.findall(r"install_requires=\[(.*?)\]", (ROOT / "setup.py").read_text(), re.S)
        installed = {"PIL" if name == "pillow" else name for name in re.findall(r'"([\w-]+)', listed)}
        # The rest of the list is what tokenizers read by.
        assert "torch" in needed and needed == installed - {"sentencepiece", "protobuf"}, needed ^ installed


if __name__ == "__main__":
    unittest.main()
