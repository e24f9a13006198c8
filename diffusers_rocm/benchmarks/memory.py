"""How much memory each rank takes, of its device and of the host, by stage of a pipeline's run."""

import math
import os
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import psutil
import torch
from diffusers import DiffusionPipeline
from torch import nn

from ..distributed import init
from ..distributed.axis import Axis
from ..distributed.collectives import all_gather_int64
from ..distributed.compression import EXACT
from ..distributed.mesh import AXES, Axes
from ..pipelines.denoisers import DENOISERS
from ..pipelines.generation import GenerationRequest, load, make_picture, versions
from ..pipelines.peaks import StagePeaks, component_bytes, weight_bytes
from ..pipelines.text_encoders import ROOM
from .distance import largest_of
from .first_forwards import KEPT, FirstForwards, bar_for
from .step import ONE, free, noted


# Before anything is loaded; loading; what comes before the first step; all steps; what follows.
STAGES = ("start", "load", "encode", "denoise", "decode")


def measure_memory(request: GenerationRequest) -> dict[str, Any]:
    """Make one picture or video, as `generate` does, and watch; then compare its first forward with one rank's.

    Every rank calls it, and gets the peaks of all. What is wrong has none.
    """
    device = init(request.device, timeout=timedelta(minutes=request.timeout))
    peaks, made = StagePeaks(device), FirstForwards()
    peaks.begin("start")
    peaks.begin("load")
    pipe, axes = load(request, device)
    if axes.world.rank > 0:
        pipe.set_progress_bar_config(disable=True)
    peaks.watch(pipe)
    made.watch(pipe)
    peaks.begin("encode")
    make_picture(pipe, axes, request, "pil")
    peaks.end()
    weights = weight_bytes(pipe)
    row = torch.tensor([sum(weights), max(weights), *(x for stage in STAGES for x in peaks.peaks.get(stage, (0, 0)))])
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


@dataclass
class _Check:
    """
    Attributes:
        forward: distance of the first forward's prediction from that of one rank, relative L2, on the rank where it is
            largest; None where that is not known.
        wrong, unchecked: why, where it is.
    """

    forward: float | None = None
    wrong: str = ""
    unchecked: str = ""


class _Enough(Exception):
    """There is what to compare with."""


class _OfOneRank(FirstForwards):
    """The pipeline ends with them: neither the other steps nor a decoder are needed."""

    note: str = ""

    def hear(self, denoiser: nn.Module, args: tuple, output: Any) -> None:
        super().hear(denoiser, args, output)
        if len(self.predictions) == KEPT:
            raise _Enough


def _largest_component(pipe: DiffusionPipeline, axes: Axes, device: torch.device) -> int:
    """Bytes that one rank, alone, would need of its host for a component at a time; denoisers are read to devices."""
    parts = dict.fromkeys(DENOISERS, axes.tp.size)
    parts |= {name: axes.replica.size for name, mode in pipe.text_encoder_modes.items() if mode == "shard"}
    sizes = {name: sum(each) * parts.get(name, 1) for name, each in component_bytes(pipe).items()}
    return max(size for name, size in sizes.items() if device.type == "cpu" or name not in DENOISERS)


def _check(request: GenerationRequest, made: FirstForwards, component: int, device: torch.device) -> _Check:
    """Of one rank, the others replicas that do the same; its components on disk until their turn, as there may be room
    for each of them where there is none for all.
    """
    world, wanted = Axis.of_all(), _OfOneRank()
    free(device)
    row = torch.tensor([component, -psutil.virtual_memory().available])
    component, available = all_gather_int64(row, world).amax(0).abs().tolist()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    if component * here > ROOM * available:
        need, room = (f"{size / 2**30:.1f} GiB" for size in (component * here, ROOM * available))
        why = f"{here} of them on a host need {need}, and it has room for {room}"
        return _Check(unchecked=f"{ONE} is not run: {why}")
    alone = {**dict.fromkeys(AXES, 1), "dp": world.size, "communication": EXACT, "compile": False, "graph": False}
    offload = "auto" if request.lora is not None else "disk"  # which adapters do not go with
    with noted(wanted, world):
        pipe, axes = load(replace(request, **alone, offload=offload), device)
        pipe.set_progress_bar_config(disable=True)
        wanted.watch(pipe)
        try:
            make_picture(pipe, axes, request, "latent")
        except _Enough:
            pass
    if wanted.note:
        return _Check(unchecked=f"{ONE} is {wanted.note}")
    forward = largest_of(made.distance_from(wanted), world)
    if forward <= bar_for(request, made, device):
        return _Check(forward)
    return _Check(forward if math.isfinite(forward) else None, f"the first forward is {forward:.1e} from {ONE}")


def report(measured: dict[str, Any]) -> str:
    """A table: GiB of each rank, and how far the first forward is from one rank's; of what is wrong, that alone."""
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
    checked = f"unchecked: {why}" if why else f"relative L2 {measured['forward']:.1e} from {ONE}"
    return "\n".join([*lines, f"first forward: {checked}"])
