"""What every rank of `diffusers-rocm generate` does."""

import inspect
import json
import os
import platform
import random
import re
import resource
import statistics
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import diffusers
import torch
import torch.distributed as dist
import transformers
from diffusers import DiffusionPipeline
from PIL import Image

from .. import __version__
from ..distributed import init
from ..distributed.axis import Axis
from ..distributed.collectives import all_gather_int64, broadcast_from_first
from ..models._modeling_parallel import TensorParallelConfig
from ..registration import DTYPE_ARGUMENT
from . import parallelize
from .contact_sheet import contact_sheet


@dataclass(frozen=True)
class GenerationRequest:
    """The pictures to make; None leaves a value to the pipeline's own default, and a seed to chance."""

    model: str
    prompts: tuple[str, ...]
    tp: int = 1
    negative_prompt: str | None = None
    steps: int | None = None
    guidance: float | None = None
    height: int | None = None
    width: int | None = None
    max_sequence_length: int | None = None
    seed: int | None = None
    dtype: str = "auto"
    device: str | None = None
    lora: str | None = None
    compile: bool = False
    timeout: float = 10.0  # minutes
    out: str = "outputs"
    contact_sheet: str | None = None


def file_stem(index: int, prompt: str, seed: int) -> str:
    """`000-a-red-circle-seed0`: the prompt's words, as far as a file name should go."""
    words = re.sub(r"[^\w]+", "-", prompt.lower()).strip("-")[:60].strip("-")
    return f"{index:03d}-{words or 'prompt'}-seed{seed}"


def load(request: GenerationRequest, device: torch.device) -> tuple[DiffusionPipeline, Axis]:
    """The pipeline on this rank's device, its denoiser sharded before it gets there."""
    dtype = torch.bfloat16 if device.type != "cpu" else torch.float32
    if request.dtype != "auto":
        dtype = getattr(torch, request.dtype)
    pipe = DiffusionPipeline.from_pretrained(request.model, **{DTYPE_ARGUMENT: dtype})
    if request.lora is not None:
        pipe.load_lora_weights(request.lora)
        pipe.fuse_lora()
        pipe.unload_lora_weights()
    axis = parallelize(pipe, TensorParallelConfig(tp=request.tp))
    pipe.to(device)
    if request.compile:
        pipe.transformer.compile_repeated_blocks(fullgraph=True)
    return pipe, axis


def call_arguments(pipe: DiffusionPipeline, request: GenerationRequest) -> dict:
    """The request in the words of this pipeline's `__call__`.

    Raises:
        ValueError: the pipeline has no such argument.
    """
    known = inspect.signature(pipe.__call__).parameters
    arguments = {
        "num_inference_steps": request.steps,
        "guidance_scale": request.guidance,
        "height": request.height,
        "width": request.width,
        "max_sequence_length": request.max_sequence_length,
        "negative_prompt": request.negative_prompt,
    }
    if request.negative_prompt is not None and "true_cfg_scale" in known:
        # Pipelines of guidance-distilled models take a negative prompt with a guidance of its own.
        arguments["true_cfg_scale"] = request.guidance if request.guidance is not None else 4.0
        arguments["guidance_scale"] = None
    arguments = {name: value for name, value in arguments.items() if value is not None}
    unknown = [name for name in arguments if name not in known]
    if unknown:
        raise ValueError(f"{type(pipe).__name__} takes no {', '.join(unknown)}")
    return arguments


class StepTimer:
    """Seconds of each denoising step, by the pipeline's callback at the end of a step."""

    def __init__(self, device: torch.device):
        self._device, self._last, self.steps = device, 0.0, []

    def start(self) -> None:
        self._last = self._now()

    def __call__(self, pipe, step, timestep, callback_kwargs: dict) -> dict:
        now = self._now()
        self.steps.append(now - self._last)
        self._last = now
        return callback_kwargs

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()


def peak_memory(axis: Axis, device: torch.device) -> list[int]:
    """Peak bytes of each rank so far: of its device, or of its host memory on a CPU."""
    if device.type == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    else:
        peak = torch.get_device_module(device.type).max_memory_allocated()
    return all_gather_int64(torch.tensor([peak]), axis).flatten().tolist()


def versions() -> dict[str, str]:
    return {
        "diffusers_rocm": __version__,
        "diffusers": diffusers.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def generate(request: GenerationRequest) -> list[Path]:
    """Make the pictures; every rank calls it, rank 0 writes.

    Returns:
        The pictures' files, on rank 0; on the others an empty list.
    """
    started, begun = time.perf_counter(), float(os.environ.get("DIFFUSERS_ROCM_STARTED", time.time()))
    device = init(request.device, timeout=timedelta(minutes=request.timeout))
    first = not dist.is_initialized() or dist.get_rank() == 0
    if not first:
        diffusers.utils.logging.disable_progress_bar()
        transformers.utils.logging.disable_progress_bar()
    pipe, axis = load(request, device)
    arguments = call_arguments(pipe, request)
    seed = random.SystemRandom().randrange(2**31) if request.seed is None else request.seed
    seed = broadcast_from_first(torch.tensor(seed), axis).item()
    loaded = time.perf_counter() - started

    bar = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_inv_fmt}]"
    pipe.set_progress_bar_config(disable=not first, bar_format=bar)
    timer, files, images = StepTimer(device), [], []
    for index, prompt in enumerate(request.prompts):
        # Drawn on the CPU: the same numbers on every rank, device and world size.
        generator = torch.Generator().manual_seed(seed)
        done = len(timer.steps)
        timer.start()
        result = pipe(
            prompt,
            generator=generator,
            callback_on_step_end=timer,
            output_type="pil" if first else "latent",
            **arguments,
        )
        peaks = peak_memory(axis, device)
        if not first:
            continue
        file = Path(request.out, file_stem(index, prompt, seed) + ".png")
        image: Image.Image = result.images[0]
        image.save(file)
        record = {
            "prompt": prompt,
            "seed": seed,
            "config": {
                **{k: v for k, v in asdict(request).items() if k not in ("prompts", "seed", "out", "contact_sheet")},
                "dtype": str(pipe.transformer.dtype).removeprefix("torch."),
                "device": device.type,
                "pipeline": type(pipe).__name__,
                "height": image.height,
                "width": image.width,
                "arguments": arguments,
            },
            "mesh": {"tp": axis.size},
            "step_seconds": [round(step, 5) for step in timer.steps[done:]],
            "load_seconds": round(loaded, 3),
            "peak_memory_bytes": peaks,
            "versions": versions(),
        }
        file.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n")
        files.append(file)
        images.append(image)

    if first:
        if request.contact_sheet is not None:
            contact_sheet(images, request.prompts, Path(request.contact_sheet))
            print(f"contact sheet: {request.contact_sheet}")
        median = statistics.median(timer.steps) * 1000 if timer.steps else 0.0
        print(
            f"{len(files)} picture(s) in {request.out}/, tp={axis.size} on {device.type}: loaded in {loaded:.1f} s, "
            f"{median:.1f} ms a step, {time.time() - begun:.1f} s in all"
        )
    return files
