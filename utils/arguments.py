"""What the scripts of utils/ take."""

import argparse
from pathlib import Path


def positive(text: str) -> int:
    """A `type=` of `add_argument`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 1")
    return int(text)


def new_file(text: str) -> Path:
    """A `type=` of `add_argument`: where a file can be written."""
    file = Path(text)
    if file.is_dir() or not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{file} is a folder, or in none that exists")
    return file
