"""How much memory each rank takes, of its device and of the host, by stage of a pipeline's run."""

from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch

from ..distributed import init
from ..distributed.collectives import all_gather_int64
from ..distributed.mesh import AXES
from .generation import GenerationRequest, call_arguments, load, versions
from .peaks import StagePeaks, weight_bytes


# Before anything is loaded; loading; what comes before the first step; all steps; what follows.
STAGES = ("start", "load", "encode", "denoise", "decode")


def measure_memory(request: GenerationRequest) -> dict[str, Any]:
    """Make one picture or video, as `generate` does, and watch. All ranks get the peaks of all."""
    device = init(request.device, timeout=timedelta(minutes=request.timeout))
    peaks = StagePeaks(device)
    peaks.begin("start")
    peaks.begin("load")
    pipe, axes = load(request, device)
    if axes.world.rank > 0:
        pipe.set_progress_bar_config(disable=True)
    peaks.watch(pipe)
    peaks.begin("encode")
    decodes = request.vae != "first-rank" or axes.replica.rank == 0
    pipe(
        prompt=request.prompts[0],
        generator=torch.Generator().manual_seed(request.seeds[0] if request.seeds else 0),
        output_type="pil" if decodes else "latent",
        **call_arguments(type(pipe), request),
    )
    peaks.end()
    weights = weight_bytes(pipe)
    row = torch.tensor([sum(weights), max(weights), *(x for stage in STAGES for x in peaks.peaks.get(stage, (0, 0)))])
    by_rank = all_gather_int64(row, axes.world)
    kept, largest = by_rank[:, :2].T.tolist()
    by_rank = by_rank[:, 2:].view(-1, len(STAGES), 2)
    return {
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


def report(measured: dict[str, Any]) -> str:
    """A table: GiB of each rank."""
    mesh = " x ".join(f"{name}={size}" for name, size in measured["mesh"].items() if size > 1) or "one rank"
    lines = [f"{measured['request']['model']}, {mesh} on {measured['device']}: peak GiB, rank by rank"]
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
    return "\n".join(lines)
