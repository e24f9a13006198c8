"""What was measured, as a table to read, as JSON to keep, and as bars to look at."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .known_models import KNOWN_MODELS
from .step import ONE, Row, StepRequest


GIB = 2**30


def header(request: StepRequest, environment: Mapping[str, Any], world: int) -> str:
    """What was run, where and with which versions."""
    size, gpus = request.size, [gpu["name"] for gpu in environment["gpus"]]
    video = f" x {size.frames} frames" if size.frames > 1 else ""
    packages = environment["packages"]
    where = f"{world} x {gpus[0]}" if gpus and request.device != "cpu" else f"{world} rank(s) on CPU"
    versions = [f"{name} {packages[name]}" for name in ("torch", "diffusers", "diffusers_rocm") if name in packages]
    config = "".join(f", {name}={value}" for name, value in request.config.items())
    settings = [
        f"{name}={value}" for name, value in environment["environment"].items() if name.startswith(("NCCL", "RCCL"))
    ]
    return "\n".join(
        [
            f"{request.model} ({KNOWN_MODELS[request.model].cls}{config}), {size.height}x{size.width}{video}, "
            f"{size.text} text tokens, {request.dtype}, random weights",
            ", ".join([where, environment["torch build"], *environment["collectives"], *versions, *settings]),
            f"milliseconds a step{' of two forwards' if request.guidance else ''}: median (least to most) of "
            f"{request.repeats} in each of {request.rounds} round(s); relative L2 to {request.reference}",
        ]
    )


def speedups(rows: Sequence[Row]) -> list[float]:
    """Over one rank in the same mode."""
    base = {row.mode: row.median for row in rows if row.name == ONE and not row.note}
    return [base.get(row.mode, math.nan) / row.median for row in rows]


def table(rows: Sequence[Row]) -> str:
    """One line a row, columns aligned; a row that is wrong has no times."""
    lines = [("", "mode", "ms", "", f"over {ONE}", "GiB a rank", "relative L2")]
    for row, speedup in zip(rows, speedups(rows), strict=True):
        if row.note:
            lines.append((row.name, row.mode, row.note))
            continue
        times = row.milliseconds
        # A CPU's memory is not counted.
        peak = f"{max(row.peak) / GIB:.2f}" if max(row.peak) else "-"
        compared = "unchecked" if row.distance is None else f"{row.distance:.1e}"
        least = f"({min(times):.2f} to {max(times):.2f})"
        lines.append((row.name, row.mode, f"{row.median:.2f}", least, f"{speedup:.2f}x", peak, compared))
    whole = [line for line in lines if len(line) == len(lines[0])]
    widths = [max(len(line[index]) for line in whole) for index in range(len(lines[0]))]
    widths[:2] = (max(len(line[index]) for line in lines) for index in range(2))
    shown = []
    for line in lines:
        cells = [text.ljust(width) for text, width in zip(line[:2], widths, strict=False)]
        if len(line) == len(lines[0]):
            cells += [text.rjust(width) for text, width in zip(line[2:], widths[2:], strict=True)]
        else:
            cells.append(line[2])
        shown.append("  ".join(cells).rstrip())
    return "\n".join(shown)


def as_json(request: StepRequest, rows: Sequence[Row], environment: Mapping[str, Any], command: str) -> dict[str, Any]:
    """All that was measured, milliseconds and bytes; None where there is no number."""
    measured = []
    for row, speedup in zip(rows, speedups(rows), strict=True):
        figures = {"ms": row.median, "speedup": speedup}
        measured.append(asdict(row) | {name: None if math.isnan(x) else x for name, x in figures.items()})
    return {"command": command, "request": asdict(request), "environment": dict(environment), "rows": measured}


def draw(rows: Sequence[Row], title: str, file: Path) -> None:
    """A bar for each row that was timed. Needs matplotlib."""
    from matplotlib.figure import Figure

    timed = [(row, speedup) for row, speedup in zip(rows, speedups(rows), strict=True) if not row.note]
    modes = list(dict.fromkeys(row.mode for row, _ in timed))
    figure = Figure(figsize=(8, 0.4 * len(timed) + 2.2), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(
        [f"{row.name}, {row.mode}" for row, _ in timed],
        [row.median for row, _ in timed],
        color=[f"C{modes.index(row.mode)}" for row, _ in timed],
    )
    axes.bar_label(bars, [f"{row.median:.1f}  ({speedup:.2f}x)" for row, speedup in timed], padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.3)
    axes.set_xlabel("milliseconds a step")
    axes.set_title("\n".join(textwrap.fill(line, 100) for line in title.splitlines()), fontsize="x-small")
    figure.savefig(file, dpi=150)
