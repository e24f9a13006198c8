"""What each `bench` leaves: a table below what says where it was measured, JSON, and bars."""

import argparse
import importlib.util
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..benchmarks.report import Bar, draw
from ..distributed.root_cause import write_whole
from .ranks import check_writable


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, help="also write what was measured to this file, whose folder is made")
    parser.add_argument("--chart", type=Path, help="also draw it, as a PNG")


def check_output(args: argparse.Namespace) -> None:
    """Raises ValueError where a file cannot be written."""
    for name in ("json", "chart"):
        file = getattr(args, name)
        if file is not None:
            if file.is_dir():
                raise ValueError(f"--{name} {file} is a folder")
            check_writable(file.parent)
    if args.chart is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--chart needs matplotlib: pip install 'diffusers_rocm[bench]'")
        if args.chart.suffix.lower() != ".png":
            raise ValueError(f"--chart writes a PNG; {args.chart} does not end in .png")


def leave(
    args: argparse.Namespace,
    argv: list[str],
    heading: str,
    table: str,
    measured: Mapping[str, Any],
    bars: Sequence[Bar],
    unit: str,
) -> None:
    """On the first rank: print the table, and write the files that are asked for."""
    print(f"{heading}\n{table}", flush=True)
    write(args, argv, measured)
    if args.chart is not None:
        draw(bars, heading, unit, args.chart)


def write(args: argparse.Namespace, argv: list[str], measured: Mapping[str, Any]) -> None:
    """The JSON, if it is asked for; also of what there is so far, which a run that is stopped then leaves."""
    if args.json is None:
        return
    text = json.dumps({"command": _command_line(argv), **measured}, indent=1) + "\n"
    file = args.json.resolve()
    if file.exists() and not file.is_file():  # a device, say
        file.write_text(text)
    else:
        write_whole(file, text)


def _command_line(argv: list[str]) -> str:
    """How to measure the same again; where it was written does not matter."""
    options = "--json", "--chart"
    files = {index + step for index, word in enumerate(argv) if word in options for step in (0, 1)}
    files |= {index for index, word in enumerate(argv) if word.partition("=")[0] in options}
    return shlex.join(["diffusers-rocm", *(word for index, word in enumerate(argv) if index not in files)])
