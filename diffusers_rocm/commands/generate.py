"""`diffusers-rocm generate`: prompts to pictures and videos, on as many ranks as asked for."""

import argparse
import functools
import importlib.util
import inspect
import math
import os
import re
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ParamSpec

import torch
from diffusers import DiffusionPipeline
from PIL import Image

from ..distributed import default_device_type, environment
from ..distributed.compression import COMMUNICATION, EXACT
from ..distributed.launching import end_rank, launch, under_torchrun
from ..distributed.mesh import AXES, resolve_degrees
from ..distributed.root_cause import record, unsuccessful
from ..pipelines.choices import CHOICES, check_choices
from ..pipelines.generation import GenerationRequest, call_arguments, generate
from ..pipelines.model_folder import EMBEDDED_MODEL, ModelFolder
from ..pipelines.quantization import QUANTIZATIONS, check_quantization
from .choose_mesh import choose_mesh
from .ranks import add_rank_arguments, check_nodes, check_world, check_writable, launch_options


P = ParamSpec("P")

# What the embedded model was trained for; FluxPipeline's own defaults are those of FLUX.1.
EMBEDDED_DEFAULTS = {"height": 128, "width": 128, "steps": 20, "max_sequence_length": 16}

AXES_HELP = {
    "dp": "replicas, each making pictures of its own; one of these five may be -1 and takes the GPUs that are left",
    "cfg": "2: each branch of classifier-free guidance has ranks of its own",
    "ring": "ranks that split the sequence and pass keys and values round",
    "ulysses": "ranks that split the sequence and trade tokens for heads",
    "tp": "ranks that share the denoiser's weights",
}


def add_parser(subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser("generate", help="make pictures or videos from prompts")
    add_arguments(parser)
    parser.add_argument("--out", type=Path, default=Path("outputs"), help="folder for the pictures")
    parser.add_argument("--contact-sheet", type=Path, help="also write all pictures on one sheet, to this PNG")
    parser.add_argument(
        "--gpus",
        metavar="N",
        help="so many on each node, or all: in a mesh that is chosen for you, or as the axes say",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="start all ranks anew, up to N times, where one failed; pictures that were written are not made again",
    )
    return parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", action="append", default=[], help="may be given several times")
    parser.add_argument("--prompts-file", type=Path, help="a UTF-8 text file with one prompt a line")
    parser.add_argument("--negative-prompt")
    parser.add_argument("--model", default=str(EMBEDDED_MODEL), help="a pipeline's folder or Hub id")
    parser.add_argument("--lora", help="a LoRA's file, folder or Hub id")
    parser.add_argument("--image", type=Path, help="the picture to begin with: image to image, or image to video")
    for axis, meaning in AXES_HELP.items():
        parser.add_argument(f"--{axis}", type=int, default=1, help=meaning)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--guidance", type=float, help="with --negative-prompt: the pipeline's true_cfg_scale")
    parser.add_argument("--height", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--num-frames", type=int, help="of a video")
    parser.add_argument("--fps", type=int, default=16, help="frames a second of the video's file (default: 16)")
    parser.add_argument("--max-sequence-length", type=int, help="text tokens")
    parser.add_argument("--seed", help="one seed, one picture, on any number of ranks; 1,2,3: one picture with each")
    parser.add_argument(
        "--num-images-per-prompt",
        type=int,
        default=1,
        help="their seeds follow each other; --dp makes some at a time (default: %(default)s)",
    )
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float16", "float32"))
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPUs if there are any (ROCm: cuda)")
    parser.add_argument(
        "--communication",
        default=EXACT,
        choices=COMMUNICATION,
        help="int8: ranks send each other activations in 8 bits, for slow links; lossy",
    )
    parser.add_argument(
        "--rotate-method",
        default="p2p",
        choices=("p2p", "allgather"),
        help="how a ring passes keys on: to the next rank, or to all at once, which slow links may prefer",
    )
    parser.add_argument("--graph", action="store_true", help="replay the denoiser's step as a CUDA or HIP graph")
    parser.add_argument("--compile", action="store_true", help="compile the denoiser's repeated blocks")
    parser.add_argument(
        "--rank-check",
        default="first",
        choices=CHOICES["rank_check"],
        help="in which steps to compare the ranks' inputs",
    )
    parser.add_argument(
        "--text-encoders",
        nargs="+",
        default=["auto"],
        metavar="[NAME=]MODE",
        help="how the ranks that share a picture hold them: each a part (shard), the first all (first-rank), each all "
        "(replicate), or what fits (auto); text_encoder=replicate text_encoder_2=shard says it of each",
    )
    parser.add_argument(
        "--offload",
        default="auto",
        choices=CHOICES["offload"],
        help="what waits for its turn: models or layers in the host's memory, models on disk, or what has to (auto)",
    )
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="torchao's, of the denoiser's weights")
    parser.add_argument(
        "--vae",
        default="first-rank",
        choices=CHOICES["vae"],
        help="which of the ranks that share a picture decode it: each all of it, the first, or each some of its tiles",
    )
    parser.add_argument("--vae-tiling", action="store_true", help="the VAE takes a picture in tiles")
    parser.add_argument("--vae-slicing", action="store_true", help="the VAE takes the pictures of a batch one by one")
    parser.add_argument(
        "--timeout",
        type=float,
        default=10.0,
        help="minutes for which a rank waits for the others (default: %(default)g)",
    )
    add_rank_arguments(parser)


def read_prompts(args: argparse.Namespace) -> tuple[str, ...]:
    """Those of the command line, then those of the file. Raises ValueError where there are none, or one is no text."""
    prompts = list(args.prompt)
    if args.prompts_file is not None:
        try:
            lines = args.prompts_file.read_text(encoding="utf-8-sig").split("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{args.prompts_file} is not UTF-8: {error.reason} at byte {error.start}") from None
        except OSError as error:
            raise ValueError(f"cannot read {args.prompts_file}: {error.strerror}") from None
        prompts += [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise ValueError("no prompt: give --prompt TEXT or --prompts-file FILE")
    for index, prompt in enumerate(prompts):
        if not prompt.strip():
            raise ValueError(f"prompt {index} is empty")
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise ValueError(f"prompt {index} is not UTF-8: {prompt!r}")
    return tuple(prompts)


def read_seeds(args: argparse.Namespace) -> tuple[int, ...]:
    """Those of each prompt's pictures."""
    if args.seed is None:
        return ()
    try:
        seeds = tuple(int(seed) for seed in args.seed.split(","))
    except ValueError:
        raise ValueError(f"--seed takes a number, or some with commas between; got {args.seed!r}") from None
    if not all(0 <= seed <= 2**63 - args.num_images_per_prompt for seed in seeds):
        raise ValueError(f"--seed must be from 0 to 2**63 - 1, and so must those that follow it; got {args.seed}")
    if len(seeds) == 1:
        return tuple(range(seeds[0], seeds[0] + args.num_images_per_prompt))
    if args.num_images_per_prompt not in (1, len(seeds)):
        raise ValueError(f"--num-images-per-prompt {args.num_images_per_prompt}, but {len(seeds)} seeds: drop it")
    return seeds


def check_one_picture(request: GenerationRequest, command: str) -> None:
    """Raises ValueError where it is of more than one."""
    count = len(request.prompts) * max(len(request.seeds), request.num_images_per_prompt)
    if count > 1:
        raise ValueError(
            f"{command} makes one picture, and {count} are asked for: give one prompt and one seed, or none"
        )


def read_text_encoders(words: list[str], folder: ModelFolder) -> str | dict[str, str]:
    """One mode for all, or that of each by its name. Raises ValueError."""
    pairs = [word.split("=", 1) for word in words]
    if len(words) > 1 and any(len(pair) == 1 for pair in pairs):
        raise ValueError(f"--text-encoders takes one mode, or NAME=MODE for each; got {' '.join(words)}")
    known = folder.text_encoders() if any(len(pair) == 2 for pair in pairs) else {}
    for pair in pairs:
        check_choices(text_encoders=pair[-1])
        if len(pair) == 2 and pair[0] not in known:
            raise ValueError(f"--text-encoders {pair[0]}={pair[1]}: {folder.model} has {', '.join(known) or 'none'}")
    return words[0] if len(pairs[0]) == 1 else dict(pairs)


def check_lora(lora: str) -> None:
    """Raises ValueError where PEFT is missing, or it is neither here nor the id of a repository."""
    if importlib.util.find_spec("peft") is None:
        raise ValueError("--lora needs PEFT: pip install peft")
    hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", lora) is not None
    if not Path(lora).exists() and (not hub_id or lora.endswith(".safetensors")):
        raise ValueError(f"--lora {lora}: no such file or folder, and not the id of a repository on the Hub")


def check_image(file: Path) -> None:
    """Raises ValueError where it is no picture."""
    try:
        with Image.open(file) as image:
            image.verify()
    except OSError as error:
        raise ValueError(f"--image {file}: {error.strerror or 'not a picture'}") from None


def on_gpus(args: argparse.Namespace) -> bool:
    """Are the ranks to be GPUs?"""
    return args.device == "cuda" or (args.device is None and default_device_type() != "cpu")


def ranks(args: argparse.Namespace) -> int:
    """How many ranks there are, or are to be started.

    Raises:
        ValueError: more than there are GPUs, or as many as are left where nothing says how many there are.
    """
    if under_torchrun():
        return int(os.environ["WORLD_SIZE"])
    degrees = [getattr(args, name) for name in AXES]
    if -1 in degrees and not on_gpus(args):
        raise ValueError("-1 takes the GPUs that are left, and there are none; say how many ranks to start")
    world = torch.cuda.device_count() * args.nodes.count if -1 in degrees else math.prod(degrees)
    check_world(world, args.nodes, on_gpus(args))
    return world


def spread_over_gpus(args: argparse.Namespace) -> None:
    """`--gpus`: sets the degrees that are not given, in all as many as GPUs (ranks, on a CPU) of all nodes.

    Raises:
        ValueError: they cannot be.
    """
    count = torch.cuda.device_count() if on_gpus(args) else 0
    if args.gpus == "all" and count == 0:
        raise ValueError("--gpus all: there are no GPUs; with --device cpu, say how many ranks to start")
    if args.gpus != "all" and not re.fullmatch("[1-9][0-9]*", args.gpus):
        raise ValueError(f"--gpus takes a number from 1, or all; got {args.gpus!r}")
    if args.gpus == "all" and under_torchrun():  # where each rank may see its own GPU alone
        world = int(os.environ["WORLD_SIZE"])
    else:
        world = (count if args.gpus == "all" else int(args.gpus)) * args.nodes.count
    if not under_torchrun():
        check_world(world, args.nodes, on_gpus(args))
    degrees = {name: getattr(args, name) for name in AXES}
    try:
        if all(degree == 1 for degree in degrees.values()):
            folder = ModelFolder(args.model)
            heads = min(folder.head_counts().values(), default=None)
            degrees = choose_mesh(world, guides(args, folder), heads, *sizes(args, folder, count))
            if not under_torchrun():
                shown = ", ".join(f"{name}={degree}" for name, degree in degrees.items()) or "one rank"
                print(
                    f"--gpus {args.gpus}: {shown}; --dp, --cfg, --ring, --ulysses and --tp choose another mesh",
                    flush=True,
                )
        degrees = resolve_degrees(degrees, world)
    except ValueError as error:
        raise ValueError(f"--gpus {args.gpus}: {error}") from None
    for name, degree in degrees.items():
        setattr(args, name, degree)


def sizes(args: argparse.Namespace, folder: ModelFolder, gpus: int) -> tuple[float, float]:
    """Bytes of the denoiser's weights, and of the smallest of this node's GPUs."""
    if gpus == 0:
        return 0, math.inf
    bits = 32 if args.dtype == "float32" else 16
    if args.quantization is not None:
        bits = 4 if args.quantization == "int4" else 8
    memory = min(torch.cuda.get_device_properties(index).total_memory for index in range(gpus))
    return folder.denoiser_parameters() * bits / 8, memory


def guides(args: argparse.Namespace, folder: ModelFolder) -> bool:
    """Will each step have two forwards, which `--cfg 2` can spread? Raises ValueError where there is no pipeline."""
    known = inspect.signature(folder.pipeline(args.image is not None).__call__).parameters
    if "negative_prompt" not in known or "guidance_scale" not in known:
        return False
    if folder.guides_by_negative_prompt(args.image is not None) and args.negative_prompt is None:
        return False
    return (args.guidance or known["guidance_scale"].default) > 1


def check(args: argparse.Namespace) -> GenerationRequest:
    """Everything that can be known before a rank starts. Raises ValueError."""
    check_nodes(args)
    if args.restarts < 0:
        raise ValueError(f"--restarts must be at least 0; got {args.restarts}")
    if args.gpus is not None:
        spread_over_gpus(args)
    request = check_request(args)
    check_writable(args.out)
    if args.contact_sheet is not None:
        if args.contact_sheet.suffix.lower() != ".png":
            raise ValueError(f"--contact-sheet writes a PNG; {args.contact_sheet} does not end in .png")
        if args.contact_sheet.is_dir():
            raise ValueError(f"--contact-sheet {args.contact_sheet} is a folder")
        check_writable(args.contact_sheet.parent)
    sheet = None if args.contact_sheet is None else str(args.contact_sheet)
    return replace(request, out=str(args.out), contact_sheet=sheet)


def check_request(args: argparse.Namespace) -> GenerationRequest:
    """What is to be made, not where it is written. Raises ValueError."""
    prompts = read_prompts(args)
    numbers = ("num_images_per_prompt", "steps", "height", "width", "num_frames", "fps", "max_sequence_length")
    for name in (*AXES, *numbers):
        value = getattr(args, name)
        if value is not None and value < 1 and not (name in AXES and value == -1):
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1; got {value}")
        if value is not None and name in ("height", "width") and value < 16:
            raise ValueError(f"--{name} must be at least 16, the pixels of one token; got {value}")
    degrees = resolve_degrees({name: getattr(args, name) for name in AXES}, ranks(args))
    folder = ModelFolder(args.model)
    folder.check_degrees(degrees)
    folder.check_files()
    if (
        degrees["cfg"] > 1
        and args.negative_prompt is None
        and folder.guides_by_negative_prompt(args.image is not None)
    ):
        raise ValueError(f"--cfg {degrees['cfg']}: {args.model} runs guidance only with a --negative-prompt")
    if degrees["cfg"] > 1 and args.guidance is not None and args.guidance <= 1:
        raise ValueError(f"--cfg {degrees['cfg']}: --guidance {args.guidance} runs none; use --dp, --ulysses or --tp")
    folder.check_vae(args.vae)
    seeds = read_seeds(args)
    if args.guidance is not None and not math.isfinite(args.guidance):
        raise ValueError(f"--guidance must be a finite number; got {args.guidance}")
    if args.image is not None:
        check_image(args.image)
        folder.pipeline(from_image=True)
    if not 0 < args.timeout < 1e6:
        raise ValueError(f"--timeout must be a number of minutes above 0; got {args.timeout}")
    if args.lora is not None:
        check_lora(args.lora)
    if args.graph and not on_gpus(args):
        raise ValueError("--graph needs a GPU")
    if args.graph and args.offload == "group":
        raise ValueError("--graph takes no layers that come to the GPU one by one: use --offload model or none")
    if args.offload == "disk" and (args.graph or args.lora is not None):
        raise ValueError(
            f"--offload disk reads weights anew, without {'--graph' if args.graph else '--lora'}: use model"
        )
    if args.quantization is not None:
        check_quantization(args.quantization, on_gpus(args))
    options = {name: getattr(args, name) for name in ("steps", "height", "width", "max_sequence_length")}
    pipeline = folder.pipeline(args.image is not None)
    known = inspect.signature(pipeline.__call__).parameters
    if args.image is None and "image" in known and known["image"].default is inspect.Parameter.empty:
        raise ValueError(f"{pipeline.__name__} begins with a picture: give --image FILE")
    if "num_frames" in known and importlib.util.find_spec("imageio_ffmpeg") is None:
        raise ValueError("videos need imageio-ffmpeg: pip install imageio imageio-ffmpeg")
    if Path(args.model).resolve() == EMBEDDED_MODEL.resolve():
        options = {name: EMBEDDED_DEFAULTS[name] if value is None else value for name, value in options.items()}
    request = GenerationRequest(
        model=args.model,
        prompts=prompts,
        **degrees,
        negative_prompt=args.negative_prompt,
        image=None if args.image is None else str(args.image),
        num_frames=args.num_frames,
        fps=args.fps,
        rank_check=args.rank_check,
        text_encoders=read_text_encoders(args.text_encoders, folder),
        offload=args.offload,
        quantization=args.quantization,
        vae=args.vae,
        vae_tiling=args.vae_tiling,
        vae_slicing=args.vae_slicing,
        guidance=args.guidance,
        seeds=seeds,
        num_images_per_prompt=args.num_images_per_prompt,
        dtype=args.dtype,
        device=args.device,
        lora=args.lora,
        compile=args.compile,
        graph=args.graph,
        communication=args.communication,
        rotate_method=args.rotate_method,
        timeout=args.timeout,
        **options,
    )
    if pipeline is not DiffusionPipeline:  # a class that this diffusers knows
        call_arguments(pipeline, request)
    return request


def unless_refused(work: Callable[P, int]) -> Callable[P, int]:
    """What the pipeline's own check of its arguments refuses, on all ranks alike, is no failure of one of them."""

    @functools.wraps(work)
    def call(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return work(*args, **kwargs)
        except ValueError as error:
            if not any(frame.name == "check_inputs" for frame in traceback.extract_tb(error.__traceback__)):
                raise
            return unsuccessful(" ".join(str(error).split()))

    return call


@unless_refused
def _generate(request: GenerationRequest) -> int:
    generate(request)
    return 0


def run(request: GenerationRequest, args: argparse.Namespace, argv: list[str]) -> int:
    if under_torchrun():
        end_rank(record(_generate)(request))
    world = math.prod(getattr(request, name) for name in AXES)
    alone = world == 1 and not args.restarts and args.log_dir is None
    if alone and not environment.unset(environment.visible_archs(), world, os.environ):
        return _generate(request)
    return launch(world, ["diffusers_rocm", *argv], **launch_options(args))
