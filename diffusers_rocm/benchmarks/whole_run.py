"""A whole picture or video, from its prompt, by mesh: the seconds of each stage, and what comes out."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ..distributed import init
from ..distributed.axis import Axis
from ..distributed.collectives import all_gather_int64, broadcast_from_first
from ..distributed.mesh import AXES
from ..pipelines.generation import GenerationRequest, load, make_picture
from ..pipelines.peaks import StagePeaks
from .answers import Answers, bar_for, farthest
from .distance import largest_of
from .report import aligned
from .step import ONE, free, in_turns, noted, parse_mesh


STAGES = ("load", "encode", "denoise", "decode")
# The largest relative L2 distance of a picture from that of one rank. In 16 bits pictures drift apart in many steps,
# with any other kernel as well: the bar is for what is no picture of the prompt. Forwards have that of a step.
BARS = {torch.float32: 1e-3, torch.float16: 0.5, torch.bfloat16: 0.5}


@dataclass
class Run:
    """What one mesh takes.

    Attributes:
        times: seconds of each stage, in each repeat; of loading, which is not repeated, in each round.
        peak: bytes of the device of the rank with the most, by stage; 0 on a CPU.
        forward: distance of forwards from those of one rank, relative L2, of the first one and where one rank's last
            two are asked for once more; None where one rank has none.
        distance: the same of the picture.
        note: why there are no times.
    """

    mesh: str
    times: dict[str, list[float]] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    forward: float | None = None
    distance: float | None = None
    note: str = ""

    @property
    def pictures(self) -> list[float]:
        """Seconds from the prompt to the picture, once all is loaded, in each repeat."""
        return list(map(sum, zip(*(self.times[stage] for stage in STAGES[1:]), strict=True)))

    @property
    def picture(self) -> float:
        """The median of these; NaN where there are no times."""
        return math.nan if self.note else statistics.median(self.pictures)

    def as_json(self) -> dict[str, Any]:
        """All of it; no times of what is wrong, and None where there is no number."""
        found = {**asdict(self), "picture": self.picture, "times": {} if self.note else self.times}
        return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in found.items()}


def measure_runs(
    request: GenerationRequest,
    meshes: Sequence[str],
    repeats: int,
    rounds: int = 1,
    told: Callable[[Run], None] = lambda run: None,
) -> list[Run]:
    """Make the first prompt's picture by each mesh, after one rank; every rank calls it.

    One rank: the others are replicas that have nothing to do.

    Args:
        repeats: pictures timed in a row.
        rounds: how often all meshes are gone through (`in_turns`). What is wrong in one is not tried again.
        told: hears of each mesh when a round of it is over.
    """
    device = init(request.device, timeout=timedelta(minutes=request.timeout))
    world, wanted, runs = Axis.of_all(), None, [Run(mesh) for mesh in (ONE, *meshes)]
    for run in in_turns(runs, rounds):
        if run.note:
            continue
        degrees, made = {"dp": world.size} if run.mesh == ONE else parse_mesh(run.mesh), _Made()
        asked = replace(request, **{**dict.fromkeys(AXES, 1), **degrees})
        with noted(run, world):
            _measure(asked, repeats, device, run, made, wanted)
        if not run.note:
            peaks = all_gather_int64(torch.tensor([run.peak[stage] for stage in STAGES]), world).amax(0)
            run.peak = dict(zip(STAGES, peaks.tolist(), strict=True))
            wanted = made if run.mesh == ONE and wanted is None else wanted
        if wanted is not None and not run.note:
            of_picture = BARS[torch.bfloat16 if asked.is_lossy else asked.dtype_on(device)]
            _compare(run, made, wanted, bar_for(asked, made.answers, device), of_picture)
        told(run)
    return runs


def _compare(run: Run, made: "_Made", wanted: "_Made", bar: float, of_picture: float) -> None:
    """Forwards of all ranks, and the picture of the first one, which is kept."""
    world, apart = Axis.of_all(), torch.zeros((), dtype=torch.float64)
    forwards = [made.answers.first, *made.again], [wanted.answers.first, *wanted.answers.last]
    forward = largest_of(farthest(*forwards), world)
    if world.rank == 0:
        apart.fill_(farthest([[made.picture]], [[wanted.picture]]))
    picture = broadcast_from_first(apart, world).item()
    run.forward, run.distance = max(forward, run.forward or 0.0), max(picture, run.distance or 0.0)
    if not (run.forward <= bar and run.distance <= of_picture):
        run.note = f"wrong: forwards are {run.forward:.1e} from {ONE}, the picture {run.distance:.1e}"


@dataclass
class _Made:
    """What comes of a mesh, and of its forwards; `again`, what they answer to those of one rank."""

    answers: Answers = field(default_factory=Answers)
    again: list[list[Tensor]] = field(default_factory=list)
    picture: Tensor | None = None


def _measure(
    request: GenerationRequest, repeats: int, device: torch.device, run: Run, made: _Made, wanted: _Made | None
) -> None:
    stages = StagePeaks(device)
    free(device)
    stages.begin("load")
    pipe, axes = load(request, device)
    pipe.set_progress_bar_config(disable=True)
    stages.end()
    run.times.setdefault("load", []).append(stages.seconds["load"])
    stages.watch(pipe)
    made.answers.hear(pipe)
    for turn in range(repeats + 1):
        stages.seconds.clear()
        stages.begin("encode")
        result = make_picture(pipe, axes, request, "np")
        stages.end()
        for stage in STAGES[1:] if turn else ():  # the first one warms up
            run.times.setdefault(stage, []).append(stages.seconds.get(stage, 0.0))
        made.answers.forget_denoisers()
    run.peak = {stage: max(run.peak.get(stage, 0), stages.peaks.get(stage, (0, 0))[0]) for stage in STAGES}
    made.picture = torch.as_tensor(result.images if hasattr(result, "images") else result.frames).float().cpu()
    made.again = wanted.answers.ask(pipe) if wanted is not None else made.answers.last


def runs_table(runs: Sequence[Run]) -> str:
    """One line a mesh, beside the first; one that is wrong, or could not be had, has no times."""
    base = runs[0].picture
    lines = [("seconds", *STAGES, "picture", "(least to most)", "", "L2: forward", "picture")]
    for run in runs:
        if run.note:
            lines.append((run.mesh, run.note))
            continue
        times = [f"{statistics.median(run.times[stage]):.3f}" for stage in STAGES]
        least = f"({min(run.pictures):.3f} to {max(run.pictures):.3f})"
        over = "-" if math.isnan(base) else f"{base / run.picture:.2f}x"
        compared = ("unchecked", "") if run.forward is None else (f"{run.forward:.1e}", f"{run.distance:.1e}")
        lines.append((run.mesh, *times, f"{run.picture:.3f}", least, over, *compared))
    return aligned(lines, 1)
