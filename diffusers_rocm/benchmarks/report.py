"""What was measured, as a table to read, as JSON to keep, and as bars to look at."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..distributed.collectives import COMPRESSED_FROM
from ..distributed.compression import COMMUNICATION
from .known_models import KNOWN_MODELS
from .step import ONE, Row, StepRequest


GIB = 2**30
BLANK_LINE = "\n\n"
OF_8_BITS = f"\nof 8 bits: sums of fewer than {COMPRESSED_FROM} elements stay exact"


def where(environment: Mapping[str, Any], world: int, device: str | None) -> str:
    """On which machine, with which versions, and how its GPUs are linked."""
    gpus, packages = [gpu["name"] for gpu in environment["gpus"]], environment["packages"]
    ranks = f"{world} x {gpus[0]}" if gpus and device != "cpu" else f"{world} rank(s) on CPU"
    names = "torch", "diffusers", "cache-dit", "diffusers_rocm"
    versions = [f"{name} {packages[name]}" for name in names if name in packages]
    settings = [
        f"{name}={value}" for name, value in environment["environment"].items() if name.startswith(("NCCL", "RCCL"))
    ]
    found = ", ".join([ranks, environment["torch build"], *environment["collectives"], *versions, *settings])
    topology = environment["topology"] if gpus and device != "cpu" else None
    return f"{found}\n{topology.split(BLANK_LINE)[0]}" if topology else found  # without its legend


def header(request: StepRequest, environment: Mapping[str, Any], world: int) -> str:
    """What was run, and where."""
    size, known = request.size, KNOWN_MODELS[request.model]
    shape = [f"{size.height}x{size.width}"] * (size.height > 1) + [f"{size.frames} frames"] * (size.frames > 1)
    text = "" if known.text is None else f"{size.text} text tokens, "
    config = "".join(f", {name}={value}" for name, value in request.config.items())
    return (
        f"{request.model} ({known.cls}{config}), {' x '.join(shape)}, {text}{request.dtype}, random weights\n"
        f"{where(environment, world, request.device)}"
    )


def how(request: StepRequest) -> str:
    """What the figures of a step are."""
    lossy = any(word in mesh for mesh in request.meshes for word in COMMUNICATION)
    besides = OF_8_BITS * lossy
    if lossy and not request.in_float32:
        by = f"{'--dtype bfloat16 ' if request.dtype == 'float32' else ''}--float32-reference"
        besides += f"; they are checked more closely by {by}"
    return (
        f"milliseconds a step{' of two forwards' if request.guidance else ''}: median (least to most) of "
        f"{request.repeats} in each of {request.rounds} round(s); relative L2 to {request.reference}{besides}"
    )


def speedups(rows: Sequence[Row]) -> list[float]:
    """Over one rank in the same mode."""
    base = {row.mode: row.median for row in rows if row.name == ONE and not row.note}
    return [base.get(row.mode, math.nan) / row.median for row in rows]


def aligned(lines: Sequence[tuple[str, ...]], left: int) -> str:
    """Columns as wide as what is in them, the first `left` to the left; a line of fewer cells ends in a note."""
    cells = [line if len(line) == len(lines[0]) else line[:-1] for line in lines]
    widths = [max(len(of[index]) for of in cells if index < len(of)) for index in range(len(lines[0]))]
    shown = []
    for line, of in zip(lines, cells, strict=True):
        texts = [
            text.ljust(width) if index < left else text.rjust(width)
            for index, (text, width) in enumerate(zip(of, widths, strict=False))
        ]
        shown.append("  ".join([*texts, *line[len(of) :]]).rstrip())
    return "\n".join(shown)


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
        over = "-" if math.isnan(speedup) else f"{speedup:.2f}x"
        lines.append((row.name, row.mode, f"{row.median:.2f}", least, over, peak, compared))
    return aligned(lines, 2)


def rows_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """All that was measured, milliseconds and bytes; None where there is no number, and no times of what is wrong."""
    measured = []
    for row, speedup in zip(rows, speedups(rows), strict=True):
        figures = {"ms": row.median, "speedup": speedup}
        if row.note:
            figures |= {"ms": math.nan, "speedup": math.nan}
        if row.distance is not None:
            figures["distance"] = row.distance
        numbers = {name: x if math.isfinite(x) else None for name, x in figures.items()}
        measured.append(asdict(row) | {"milliseconds": [] if row.note else row.milliseconds} | numbers)
    return measured


@dataclass(frozen=True)
class Bar:
    """What was measured of one thing, and each time; those of one kind have one colour."""

    name: str
    value: float
    said: str
    kind: str = ""
    times: Sequence[float] = ()


def bars(rows: Sequence[Row]) -> list[Bar]:
    """One for each row; of no length where there are no times."""
    found = []
    for row, speedup in zip(rows, speedups(rows), strict=True):
        over = "" if math.isnan(speedup) else f"  ({speedup:.2f}x)"
        said = row.note.partition(":")[0] or f"{row.median:.1f}{over}"
        value, times = (0.0, ()) if row.note else (row.median, row.milliseconds)
        found.append(Bar(f"{row.name}, {row.mode}", value, said, row.mode, times))
    return found


def draw(bars: Sequence[Bar], title: str, unit: str, file: Path) -> None:
    """Bars, with the least and the most of what was measured several times. Needs matplotlib."""
    from matplotlib.figure import Figure

    kinds, lines = list(dict.fromkeys(bar.kind for bar in bars)), title.splitlines()
    figure = Figure(figsize=(8, 0.4 * len(bars) + 1.2 + 0.3 * len(lines)), layout="constrained")
    axes = figure.subplots()
    ends = [(min(bar.times, default=bar.value), max(bar.times, default=bar.value)) for bar in bars]
    drawn = axes.barh(
        range(len(bars)),
        [bar.value for bar in bars],
        tick_label=[bar.name for bar in bars],
        color=[f"C{kinds.index(bar.kind)}" for bar in bars],
        xerr=[
            [bar.value - least for bar, (least, _) in zip(bars, ends, strict=True)],
            [most - bar.value for bar, (_, most) in zip(bars, ends, strict=True)],
        ]
        if any(bar.times for bar in bars)
        else None,
        capsize=3,
    )
    axes.bar_label(drawn, [bar.said for bar in bars], padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.3)
    axes.set_xlabel(unit)
    # The links between GPUs are a table.
    shown = "\n".join(textwrap.fill(line.expandtabs(8), 100) for line in lines)
    axes.set_title(shown, fontsize="xx-small", family="monospace", loc="left", x=0)
    figure.savefig(file, dpi=150)
