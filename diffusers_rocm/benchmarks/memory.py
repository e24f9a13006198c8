"""How much memory each rank takes, of its device and of the host, by stage of a pipeline's run."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from ..distributed import init
from ..distributed.axis import Axis
from ..distributed.collectives import all_gather_int64
from ..distributed.compression import EXACT
from ..distributed.mesh import AXES, Axes
from ..hooks.step_graph import WARM_UP, StepGraph
from ..pipelines.denoisers import DENOISERS, denoisers_of
from ..pipelines.generation import GenerationRequest, load, make_picture, versions
from ..pipelines.peaks import StagePeaks, weight_bytes
from ..pipelines.room import host_room
from .answers import Answers, bar_for, farthest
from .distance import largest_of
from .step import ONE, free, noted


# Before anything is loaded; loading; what comes before the first step; all steps; what follows.
STAGES = ("start", "load", "encode", "denoise", "decode")


def measure_memory(request: GenerationRequest) -> dict[str, Any]:
    """Make one picture or video, as `generate` does, and watch; then compare what its models answered with one rank's.

    Every rank calls it, and gets the peaks of all. What is wrong has none.

    Raises:
        ValueError: what `load_pipeline` raises; graphs were asked for, and the steps were too few to become one.
    """
    device = init(request.device, timeout=timedelta(minutes=request.timeout))
    peaks, made = StagePeaks(device), Answers()
    peaks.begin("start")
    peaks.begin("load")
    pipe, axes = load(request, device)
    if axes.world.rank > 0:
        pipe.set_progress_bar_config(disable=True)
    peaks.watch(pipe)
    made.hear(pipe, decoder=True)
    weights = weight_bytes(pipe)
    peaks.begin("encode")
    make_picture(pipe, axes, request, "pil")
    peaks.end()
    made.forget_denoisers()
    if request.graph and not any(map(_is_a_graph, denoisers_of(pipe))):
        raise ValueError(f"no step became a graph, before which {WARM_UP} of its kind go: ask for more by --steps")
    of_stages = (x for stage in STAGES for x in peaks.peaks.get(stage, (0, 0)))
    row = torch.tensor([sum(weights), max(weights, default=0), *of_stages])
    by_rank = all_gather_int64(row, axes.world)
    kept, largest = by_rank[:, :2].T.tolist()
    by_rank = by_rank[:, 2:].view(-1, len(STAGES), 2)
    measured = {
        "request": asdict(request),
        "mesh": {name: getattr(axes, name).size for name in AXES},
        "text_encoders": pipe.text_encoder_modes,
        "weights": kept,
        "largest_tensor": largest,
        "peaks": {
            stage: {"device": by_rank[:, index, 0].tolist(), "host": by_rank[:, index, 1].tolist()}
            for index, stage in enumerate(STAGES)
        },
        "device": torch.get_device_module(device).get_device_name() if device.type != "cpu" else "CPU",
        "versions": versions(),
    }
    largest_component = _largest_component(pipe, axes, device)
    del pipe
    check = _check(request, made, largest_component, device)
    return measured | asdict(check) | ({"peaks": {}} if check.wrong else {})


def _is_a_graph(denoiser: nn.Module) -> bool:
    return any(isinstance(hook, StepGraph) and hook.captured for hook in denoiser.parallelism.hooks)


@dataclass
class _Check:
    """
    Attributes:
        distance: relative L2 of the first forward, the last two and the decoder from those of one rank, where it is
            largest, on any rank; None where that is not known.
        wrong, unchecked: why, where it is.
    """

    distance: float | None = None
    wrong: str = ""
    unchecked: str = ""


class _Enough(Exception):
    """There is what to compare with."""


class _First(Answers):
    """The pipeline ends with it: the rest is asked for by itself."""

    def forward(self, component: str, call: Callable, args: tuple, kwargs: dict) -> Any:
        super().forward(component, call, args, kwargs)
        raise _Enough


def _largest_component(pipe: DiffusionPipeline, axes: Axes, device: torch.device) -> int:
    """Bytes that one rank, alone, would need of its host for a component at a time; denoisers are read to devices."""
    parts = dict.fromkeys(DENOISERS, axes.tp.size)
    parts |= {name: axes.replica.size for name, mode in pipe.text_encoder_modes.items() if mode == "shard"}
    of_host = {name: each for name, each in pipe.components.items() if device.type == "cpu" or name not in DENOISERS}
    models = {name: each for name, each in of_host.items() if isinstance(each, nn.Module)}
    sizes = (sum(x.nbytes for x in each.parameters()) * parts.get(name, 1) for name, each in models.items())
    return max(sizes, default=0)


@dataclass
class _OfOneRank:
    """Attributes: what it answers; why it does not."""

    answers: list[list[Tensor]] = field(default_factory=list)
    note: str = ""


def _check(request: GenerationRequest, made: Answers, component: int, device: torch.device) -> _Check:
    """Of one rank, the others replicas that do the same; its components on disk until their turn, as there may be room
    for each of them where there is none for all.
    """
    world, one = Axis.of_all(), _OfOneRank()
    free(device)
    together, room = host_room(component, world)
    if together > room:
        need, there = (f"{size / 2**30:.1f} GiB" for size in (together, room))
        return _Check(unchecked=f"{ONE} is not run: those of a host need {need} of it, and it has room for {there}")
    alone = {**dict.fromkeys(AXES, 1), "dp": world.size, "communication": EXACT, "compile": False, "graph": False}
    offload = "auto" if request.lora is not None else "disk"  # which adapters do not go with
    with noted(one, world):
        pipe, axes = load(replace(request, **alone, offload=offload), device)
        pipe.set_progress_bar_config(disable=True)
        first = _First()
        first.hear(pipe)
        with contextlib.suppress(_Enough):
            make_picture(pipe, axes, request, "latent")
        first.forget_denoisers()
        one.answers = [first.first, *made.ask(pipe)]
    if one.note:
        return _Check(unchecked=f"{ONE} is {one.note}")
    distance = largest_of(farthest([made.first, *made.last], one.answers), world)
    if distance <= bar_for(request, made, device):
        return _Check(distance)
    return _Check(distance if math.isfinite(distance) else None, f"{distance:.1e} from {ONE}")


def report(measured: dict[str, Any]) -> str:
    """A table: GiB of each rank, and how far its answers are from one rank's; of what is wrong, that alone."""
    mesh = " x ".join(f"{name}={size}" for name, size in measured["mesh"].items() if size > 1) or "one rank"
    lines = [f"{measured['request']['model']}, {mesh} on {measured['device']}: peak GiB, rank by rank"]
    if measured["wrong"]:
        return "\n".join([*lines, f"wrong: {measured['wrong']}"])
    kept, largest = (
        " ".join(f"{size / 2**30:6.2f}" for size in measured[name]) for name in ("weights", "largest_tensor")
    )
    lines.append(f"weights  kept   {kept}   largest tensor {largest}")
    for stage, of in measured["peaks"].items():
        # A rank that has no part in a stage, as in decoding, has no peak either.
        device, host = (
            " ".join(
                f"{size / 2**30:6.2f}" if there else "     -"
                for size, there in zip(of[where], of["host"], strict=True)
            )
            for where in ("device", "host")
        )
        lines.append(f"{stage:8} device {device}   host {host}")
    why = measured["unchecked"]
    return "\n".join([*lines, f"unchecked: {why}" if why else f"relative L2 {measured['distance']:.1e} from {ONE}"])
