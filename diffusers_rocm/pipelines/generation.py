"""What every rank of `diffusers-rocm generate` does."""

import functools
import inspect
import os
import platform
import random
import statistics
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from diffusers.utils import BaseOutput
from PIL import Image
from torch import nn

from .. import __version__
from ..distributed import init, is_first_rank
from ..distributed.axis import Axis
from ..distributed.collectives import all_gather_int64, broadcast_from_first
from ..distributed.compression import EXACT
from ..distributed.mesh import AXES, Axes
from ..models._modeling_parallel import ParallelConfig
from .contact_sheet import contact_sheet
from .denoisers import denoisers_of
from .load import load_pipeline
from .model_folder import ModelFolder
from .outputs import file_stem, first_frame, whole_file, write, written
from .pace import compare_paces
from .peaks import device_peak, host_peak
from .quantization import torchao_config


# What a picture, its time and its memory depend on, besides its size and steps.
_TOLD = ("guidance", "num_frames", "max_sequence_length", "lora", "compile", "graph", "communication", "rotate_method")
_TOLD += ("text_encoders", "offload", "quantization", "vae", "vae_tiling", "vae_slicing")


@dataclass(frozen=True)
class GenerationRequest:
    """The pictures or videos to make; None leaves a value to the pipeline's own default.

    Each prompt is made with each of the seeds; without any, with one that is left to chance and those that follow it.
    """

    model: str
    prompts: tuple[str, ...]
    dp: int = 1
    cfg: int = 1
    ring: int = 1
    ulysses: int = 1
    tp: int = 1
    negative_prompt: str | None = None
    image: str | None = None
    steps: int | None = None
    guidance: float | None = None
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    fps: int = 16
    max_sequence_length: int | None = None
    seeds: tuple[int, ...] = ()
    num_images_per_prompt: int = 1
    dtype: str = "auto"
    device: str | None = None
    lora: str | None = None
    compile: bool = False
    graph: bool = False
    communication: str = EXACT
    rotate_method: str = "p2p"
    rank_check: str = "first"
    text_encoders: str | dict[str, str] = "auto"
    offload: str = "auto"
    quantization: str | None = None
    vae: str = "first-rank"
    vae_tiling: bool = False
    vae_slicing: bool = False
    timeout: float = 10.0  # minutes
    out: str = "outputs"
    contact_sheet: str | None = None

    def described(self) -> str:
        """How a picture is made: its size, its steps, and what is not as usual; no mesh, and not what of."""
        size = f"{self.height}x{self.width}" if self.height and self.width else "its own size"
        steps = f"{self.steps} steps" if self.steps else "its own number of steps"
        others = [
            name.replace("_", "-") if value is True else f"{name.replace('_', '-')}={value}"
            for name, value in vars(self).items()
            if name in _TOLD and value != getattr(type(self), name)
        ]
        return ", ".join([size, steps, f"dtype {self.dtype}", *others])

    def dtype_on(self, device: torch.device) -> torch.dtype:
        """Of the weights, quantised ones aside."""
        if self.dtype != "auto":
            return getattr(torch, self.dtype)
        return torch.bfloat16 if device.type != "cpu" else torch.float32

    @property
    def is_lossy(self) -> bool:
        """Whether several ranks may round what one does not, or otherwise."""
        return self.communication != EXACT or self.quantization is not None


def load(request: GenerationRequest, device: torch.device) -> tuple[DiffusionPipeline, Axes]:
    """The parallel pipeline on this rank's device; the first rank shows how far it is."""
    if not is_first_rank():
        diffusers.utils.logging.disable_progress_bar()
        transformers.utils.logging.disable_progress_bar()
    pipe = load_pipeline(
        request.model,
        ParallelConfig(
            **{name: getattr(request, name) for name in AXES},
            communication=request.communication,
            rotate_method=request.rotate_method,
        ),
        torch_dtype=request.dtype_on(device),
        text_encoders=request.text_encoders,
        # With "first-rank" nobody but the first rank asks its pipeline for pictures, so there is nothing to share.
        vae="replicate" if request.vae == "first-rank" else request.vae,
        rank_check=request.rank_check,
        offload=request.offload,
        quantization_config=None if request.quantization is None else torchao_config(request.quantization),
        graph=request.graph,
        device=request.device,
        pipeline=ModelFolder(request.model).pipeline(request.image is not None),
    )
    if request.lora is not None:
        pipe.load_lora_weights(request.lora)
        if request.quantization is None:  # which the sum of both would be rounded by once more
            pipe.fuse_lora()
            pipe.unload_lora_weights()
    for name in ("tiling", "slicing"):
        if getattr(request, f"vae_{name}"):
            _enable(getattr(pipe, "vae", None), name)
    if request.compile:
        for denoiser in denoisers_of(pipe):
            denoiser.compile_repeated_blocks()
    return pipe, pipe.transformer.parallelism.axes


def _enable(vae: nn.Module | None, name: str) -> None:
    """Turn the VAE's tiling or slicing on. Raises ValueError where it has none."""
    if not hasattr(vae, f"use_{name}"):
        kind = "there is no VAE" if vae is None else f"{type(vae).__name__} has no {name}"
        raise ValueError(f"--vae-{name}: {kind}")
    getattr(vae, f"enable_{name}")()


def call_arguments(pipeline: type[DiffusionPipeline], request: GenerationRequest) -> dict:
    """The request in the words of the pipeline's `__call__`.

    Raises:
        ValueError: the pipeline has no such argument.
    """
    known = inspect.signature(pipeline.__call__).parameters
    arguments = {
        "num_inference_steps": request.steps,
        "guidance_scale": request.guidance,
        "height": request.height,
        "width": request.width,
        "num_frames": request.num_frames,
        "image": None if request.image is None else Image.open(request.image).convert("RGB"),
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
        raise ValueError(f"{pipeline.__name__} takes no {', '.join(unknown)}")
    return arguments


def make_picture(pipe: DiffusionPipeline, axes: Axes, request: GenerationRequest, output_type: str) -> BaseOutput:
    """The first prompt's, with the first seed, or 0; a rank that does not decode has latents."""
    decodes = request.vae != "first-rank" or axes.replica.rank == 0
    return pipe(
        prompt=request.prompts[0],
        generator=torch.Generator().manual_seed(request.seeds[0] if request.seeds else 0),
        output_type=output_type if decodes else "latent",
        **call_arguments(type(pipe), request),
    )


class StepTimer:
    """Seconds of each denoising step: from one of the scheduler's to the next."""

    def __init__(self, device: torch.device, scheduler: Any):
        self._device, self._last, self.steps = device, 0.0, []
        step = scheduler.step

        @functools.wraps(step)  # pipelines look at the signature
        def timed(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            now = self._now()
            self.steps.append(now - self._last)
            self._last = now
            return result

        scheduler.step = timed

    def start(self) -> None:
        self._last = self._now()

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()


def peak_memory(world: Axis, device: torch.device) -> list[int]:
    """Peak bytes of each rank so far: of its device, or of its host memory on a CPU."""
    peak = host_peak() if device.type == "cpu" else device_peak(device)
    return all_gather_int64(torch.tensor([peak]), world).flatten().tolist()


def versions() -> dict[str, str]:
    """Of what a picture depends on."""
    return {
        "diffusers_rocm": __version__,
        "diffusers": diffusers.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def generate(request: GenerationRequest) -> list[Path]:
    """Make the pictures; every rank calls it, rank 0 writes.

    What ranks of the same run wrote, before one of them failed, is not made again.

    Returns:
        The pictures' files, on rank 0; on the others an empty list.
    """
    started, begun = time.perf_counter(), float(os.environ.get("DIFFUSERS_ROCM_STARTED", time.time()))
    device = init(request.device, timeout=timedelta(minutes=request.timeout))
    first = is_first_rank()
    pipe, axes = load(request, device)
    arguments = call_arguments(type(pipe), request)
    # Left to chance, and the same when the ranks of a run are started anew.
    chance = broadcast_from_first(torch.tensor(random.Random(begun).randrange(2**31)), axes.world).item()
    seeds = request.seeds or range(chance, chance + request.num_images_per_prompt)
    wanted = [(prompt, seed) for prompt in request.prompts for seed in seeds]
    stems = [Path(request.out, file_stem(index, *each)) for index, each in enumerate(wanted)]
    # Rank 0 knows what it has written: others may be on other nodes.
    files = {index: file for index, stem in enumerate(stems) if first and (file := written(stem, begun))}
    left = broadcast_from_first(torch.tensor([index not in files for index in range(len(wanted))]), axes.world)
    left = left.nonzero().flatten().tolist()
    if files:
        print(f"{len(files)} of {len(wanted)} are in {request.out}/ since before the restart", flush=True)
    loaded = time.perf_counter() - started

    bar = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_inv_fmt}]"
    pipe.set_progress_bar_config(disable=not first, bar_format=bar)
    timer, steady, frames = StepTimer(device, pipe.scheduler), [], {}
    for start in range(0, len(left), axes.dp.size):
        # One for each replica. Drawn on the CPU: the same numbers on every rank, device and world size.
        turn = left[start : start + axes.dp.size]
        prompts = [wanted[index][0] for index in turn]
        generators = [torch.Generator().manual_seed(wanted[index][1]) for index in turn]
        done = len(timer.steps)
        timer.start()
        decodes = request.vae != "first-rank" or axes.replica.rank == 0
        result = pipe(
            prompt=prompts if len(prompts) > 1 else prompts[0],
            generator=generators if len(prompts) > 1 else generators[0],
            output_type="pil" if decodes else "latent",
            **arguments,
        )
        steady += timer.steps[done + 1 :] or timer.steps[done:]  # the first has what comes before the steps
        peaks = peak_memory(axes.world, device)
        if not first:
            continue
        for index, made in zip(turn, _outputs(result), strict=True):
            prompt, seed = wanted[index]
            record = {
                "prompt": prompt,
                "seed": seed,
                "config": _config(request, arguments, pipe, device, made),
                "mesh": {name: getattr(axes, name).size for name in AXES},
                "text_encoders": pipe.text_encoder_modes,
                "step_seconds": [round(step, 5) for step in timer.steps[done:]],
                "load_seconds": round(loaded, 3),
                "peak_memory_bytes": peaks,
                "started": begun,
                "versions": versions(),
            }
            files[index] = write(made, record, stems[index], request.fps)
            frames[index] = _first_frame(made)

    compare_paces(steady, device, axes.world)
    if first:
        if request.contact_sheet is not None:
            images = [frames[index] if index in frames else first_frame(files[index]) for index in range(len(wanted))]
            with whole_file(Path(request.contact_sheet)) as partial:
                contact_sheet(images, [prompt for prompt, _ in wanted], partial)
            print(f"contact sheet: {request.contact_sheet}")
        if axes.replica.size > 1 and pipe.text_encoder_modes:
            print(f"text encoders: {', '.join(f'{name} {mode}' for name, mode in pipe.text_encoder_modes.items())}")
        median = statistics.median(timer.steps) * 1000 if timer.steps else 0.0
        kind = "video" if any(file.suffix == ".mp4" for file in files.values()) else "picture"
        print(
            f"{len(files)} {kind}(s) in {request.out}/, {axes} on {device.type}: loaded in {loaded:.1f} s, "
            f"{median:.1f} ms a step, {time.time() - begun:.1f} s in all"
        )
    return [files[index] for index in sorted(files)]


# What the records leave out of the request.
_NOT_OF_ONE_PICTURE = ("prompts", "seeds", "num_images_per_prompt", "out", "contact_sheet", *AXES)


def _config(
    request: GenerationRequest,
    arguments: dict[str, Any],
    pipe: DiffusionPipeline,
    device: torch.device,
    made: Image.Image | list[Image.Image],
) -> dict[str, Any]:
    """What a picture or a video was asked for, and what was left to the pipeline as it came out."""
    frame = _first_frame(made)
    return {
        **{key: value for key, value in asdict(request).items() if key not in _NOT_OF_ONE_PICTURE},
        "dtype": str(pipe.transformer.dtype).removeprefix("torch."),
        "device": device.type,
        "pipeline": type(pipe).__name__,
        "height": frame.height,
        "width": frame.width,
        "num_frames": len(made) if isinstance(made, list) else None,
        "arguments": {key: value for key, value in arguments.items() if key != "image"},
    }


def _first_frame(made: Image.Image | list[Image.Image]) -> Image.Image:
    return made[0] if isinstance(made, list) else made


def _outputs(result: BaseOutput) -> list:
    """Pictures, or videos as lists of frames."""
    return result.images if hasattr(result, "images") else result.frames
