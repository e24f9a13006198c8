"""A whole picture or video, from its prompt, by mesh: the seconds of each stage, and what comes out."""

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
from torch import Tensor

from ..distributed import init
from ..distributed.axis import Axis
from ..distributed.collectives import broadcast_from_first
from ..distributed.mesh import AXES
from ..pipelines.generation import GenerationRequest, call_arguments, load
from ..pipelines.peaks import StagePeaks
from .step import ONE, parse_mesh


STAGES = ("load", "encode", "denoise", "decode")
# The largest relative L2 distance of a picture from that of one rank. In 16 bits pictures drift apart in many steps,
# with any other kernel as well: the bar is for what is no picture of the prompt.
BARS = {"float32": 1e-3, "float16": 0.5, "bfloat16": 0.5}


@dataclass
class Run:
    """What one mesh takes.

    Attributes:
        times: seconds of each stage, in each repeat; of loading, which is not repeated, once.
        peak: bytes of the device of the rank with the most, by stage; 0 on a CPU.
        distance: of the picture from that of one rank, relative L2.
    """

    mesh: str
    times: dict[str, list[float]] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    distance: float = 0.0
    wrong: bool = False

    @property
    def pictures(self) -> list[float]:
        """Seconds from the prompt to the picture, once all is loaded, in each repeat."""
        return list(map(sum, zip(*(self.times[stage] for stage in STAGES[1:]), strict=True)))

    @property
    def picture(self) -> float:
        """The median of these."""
        return statistics.median(self.pictures)


def measure_runs(
    request: GenerationRequest, meshes: Sequence[str], repeats: int, told: Callable[[Run], None] = lambda run: None
) -> list[Run]:
    """Make the first prompt's picture by each mesh, after one rank; every rank calls it.

    One rank: the others are replicas that have nothing to do.
    """
    device = init(request.device, timeout=timedelta(minutes=request.timeout))
    world, wanted, runs = Axis.of_all(), None, []
    for mesh in (ONE, *meshes):
        degrees = {"dp": world.size} if mesh == ONE else parse_mesh(mesh)
        run, made = _measure(replace(request, **{**dict.fromkeys(AXES, 1), **degrees}), mesh, repeats, device)
        wanted = made if wanted is None else wanted
        distance = torch.zeros(1, dtype=torch.float64)
        if world.rank == 0:
            distance += (made - wanted).norm() / wanted.norm()
        run.distance = broadcast_from_first(distance, world).item()
        run.wrong = not run.distance <= BARS[_dtype(request, device)]
        runs.append(run)
        told(run)
    return runs


def _dtype(request: GenerationRequest, device: torch.device) -> str:
    if request.dtype != "auto":
        return request.dtype
    return "bfloat16" if device.type != "cpu" else "float32"


def _measure(request: GenerationRequest, name: str, repeats: int, device: torch.device) -> tuple[Run, Tensor]:
    stages, run = StagePeaks(device), Run(name)
    gc.collect()  # the pipeline of the mesh before refers to itself through its hooks
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
    stages.begin("load")
    pipe, axes = load(request, device)
    pipe.set_progress_bar_config(disable=True)
    stages.end()
    run.times["load"] = [stages.seconds["load"]]
    stages.watch(pipe)
    decodes = request.vae != "first-rank" or axes.replica.rank == 0
    run.times |= {stage: [] for stage in STAGES[1:]}
    for turn in range(repeats + 1):
        stages.seconds.clear()
        stages.begin("encode")
        result = pipe(
            prompt=request.prompts[0],
            generator=torch.Generator().manual_seed(request.seeds[0] if request.seeds else 0),
            output_type="np" if decodes else "latent",
            **call_arguments(type(pipe), request),
        )
        stages.end()
        for stage in STAGES[1:] if turn else ():  # the first one warms up
            run.times[stage].append(stages.seconds.get(stage, 0.0))
    run.peak = {stage: stages.peaks.get(stage, (0, 0))[0] for stage in STAGES}
    made = result.images if hasattr(result, "images") else result.frames
    for denoiser in {id(x): x for x in pipe.components.values() if hasattr(x, "parallelism")}.values():
        denoiser.disable_parallelism()
    return run, torch.as_tensor(made).float().cpu()


def runs_table(runs: Sequence[Run]) -> str:
    """One line a mesh, beside the first; one that is wrong has no times."""
    base = runs[0].picture
    heads = "".join(f"{stage:>10}" for stage in (*STAGES, "picture"))
    lines = [f"{'seconds':20}{heads}{'(least to most)':>20}{'':9}{'relative L2':>12}"]
    for run in runs:
        if run.wrong:
            lines.append(f"{run.mesh:20}wrong: {run.distance:.1e} from {ONE}")
            continue
        times = "".join(f"{statistics.median(run.times[stage]):>10.3f}" for stage in STAGES)
        least = f"({min(run.pictures):.3f} to {max(run.pictures):.3f})"
        lines.append(
            f"{run.mesh:20}{times}{run.picture:>10.3f}{least:>20}{base / run.picture:>8.2f}x{run.distance:>12.1e}"
        )
    return "\n".join(lines)
