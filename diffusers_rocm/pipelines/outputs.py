"""The files of pictures and videos, with a record beside each. A file is there whole, or not at all."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diffusers.utils import export_to_video, load_video
from PIL import Image


def file_stem(index: int, prompt: str, seed: int) -> str:
    """`000-a-red-circle-seed0`: the prompt's words, as far as a file name should go."""
    words = re.sub(r"[^\w]+", "-", prompt.lower()).strip("-")[:60].strip("-")
    return f"{index:03d}-{words or 'prompt'}-seed{seed}"


@contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """Another name to write to, which becomes `file` when everything is written."""
    partial = file.with_name(f".partial-{file.name}")
    yield partial
    os.replace(partial, file)


def write(made: Image.Image | list[Image.Image], record: dict[str, Any], stem: Path, fps: int) -> Path:
    """Write a picture or a video, and then its record, which says that both are there. Returns the former's file."""
    file = stem.with_name(stem.name + (".mp4" if isinstance(made, list) else ".png"))
    with whole_file(file) as partial:
        if isinstance(made, list):
            export_to_video(made, str(partial), fps=fps)
        else:
            made.save(partial)
    with whole_file(stem.with_name(f"{stem.name}.json")) as partial:
        partial.write_text(json.dumps(record, indent=2) + "\n")
    return file


def written(stem: Path, started: float) -> Path | None:
    """The file that `write` made of this since the run was started, by ranks that have failed since; else None."""
    record = stem.with_name(f"{stem.name}.json")
    if not record.exists() or json.loads(record.read_text()).get("started") != started:
        return None
    return next((file for end in (".png", ".mp4") if (file := stem.with_name(stem.name + end)).exists()), None)


def first_frame(file: Path) -> Image.Image:
    """Of a picture or a video."""
    if file.suffix == ".mp4":
        return load_video(str(file))[0]
    with Image.open(file) as image:
        return image.copy()
