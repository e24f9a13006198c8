"""`diffusers-rocm plan`: which mesh to take, before any of it is there; what each rank of it will hold."""

import argparse
import json
import logging
import math
import re
import sys
import threading
from dataclasses import asdict, dataclass, replace
from typing import Any

import diffusers
import huggingface_hub
import torch
import transformers

from ..benchmarks.known_models import Size, cannot_be_had
from ..distributed.launching import under_torchrun
from ..models.plans.verify import PlanReport, verify_plan
from ..pipelines.quantization import QUANTIZATIONS
from ..planner.hardware import BETWEEN_NODES, Links, find_gpu
from ..planner.measure import measure
from ..planner.search import (
    QUANTIZED,
    RESERVED,
    WEIGHT_BYTES,
    Candidate,
    Dropped,
    Machine,
    computed,
    never_made,
    one_gpu,
    search,
)
from ..planner.subject import SUBJECTS, Subject, find_subject, known_subject, open_folder


# More than there is of any, and what takes minutes to look at.
MOST = {"gpus": 4096, "nodes": 4096, "resolution": 1 << 15, "frames": 10_000, "text": 1_000_000, "tp": 4096}


# Seconds without a word, where stderr is no terminal.
PATIENCE = 15


@dataclass(frozen=True)
class PlanRequest:
    """Checked arguments; without a machine, only what a rank holds is asked."""

    subject: Subject | None
    size: Size | None
    machine: Machine | None


def add_parser(subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser("plan", help="which mesh to take: predicted seconds and memory, without a GPU")
    parser.add_argument(
        "--model", required=True, help=f"{', '.join(SUBJECTS)}, their ids on the Hub, or a pipeline's folder or id"
    )
    parser.add_argument("--gpus", type=int, help="of each node; default: those of this machine")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpu", help="which: 'RX 7900 XTX', H200, ...; default: this machine's")
    parser.add_argument("--memory", help="of each GPU, 16GB say; default: as this GPU has")
    parser.add_argument("--link", help="what a GPU sends to others of its node, 12GB/s say; default: by the GPU")
    parser.add_argument("--internode", help="what a GPU sends to other nodes; default: 50GB/s")
    parser.add_argument("--measure", action="store_true", help="measure this machine's GPUs and links first")
    parser.add_argument("--resolution", type=int, help="the height; default: what the model is for")
    parser.add_argument("--frames", type=int, help="of a video; default: what the model is for")
    parser.add_argument("--text", type=int, help="text tokens")
    parser.add_argument("--dtype", default="bfloat16", choices=WEIGHT_BYTES, help="of the weights")
    parser.add_argument(
        "--guidance", action=argparse.BooleanOptionalAction, help="a step is two forwards; default: by the model"
    )
    parser.add_argument("--all", action="store_true", help="all meshes, and not just the fastest ten")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--tp", type=int, help="without --gpus: what a rank of a pipeline's folder or id holds")
    parser.add_argument("--explain", action="store_true", help="also what is replicated, and why")
    parser.add_argument("--json", action="store_true", help="as JSON")
    return parser


def check(args: argparse.Namespace) -> PlanRequest:
    """Raises ValueError."""
    # Nothing is loaded: what importing classes has to say of their weights and processors does not matter here.
    for library in (diffusers, transformers, huggingface_hub):  # the last says each time that it tries again
        library.utils.logging.set_verbosity_error()
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    for name, most in MOST.items():
        value = getattr(args, name)
        if value is not None and not 1 <= value <= most:
            bound = "at least 1" if value < 1 else f"at most {most}"
            raise ValueError(f"--{name} must be {bound}; got {value}")
    if args.tp is not None and args.gpus is None:
        _explained(args.model, args.tp, args.dtype)
        return PlanRequest(None, None, None)
    if args.dtype == "float32":
        raise ValueError(
            "--dtype float32: the rates that seconds are predicted by are of 16 bits, and float32 is several times "
            "slower; plan for bfloat16 or float16, or ask for bytes alone, by --tp N without --gpus"
        )
    subject = find_subject(args.model)
    size = subject.known.sized(args.resolution, args.frames, args.text)
    if args.guidance is not None:
        subject = replace(subject, forwards=1 + args.guidance)
    if not hasattr(diffusers, subject.known.cls):
        raise ValueError(f"diffusers {diffusers.__version__} has no {subject.known.cls}")
    gpus = args.gpus or torch.cuda.device_count()
    if gpus == 0:
        raise ValueError("this machine has no GPUs to plan for: give --gpus 4, say")
    if gpus * args.nodes > MOST["gpus"]:
        raise ValueError(f"--nodes {args.nodes} of {gpus} GPUs each: plan for at most {MOST['gpus']} in all")
    if args.tp is not None:
        _check_tp(args, gpus)
    if args.measure and (args.gpu or under_torchrun()):
        raise ValueError("--measure measures the GPUs that are here, in one process: without --gpu and torchrun")
    gpu = find_gpu("H200" if args.measure else args.gpu)  # what is measured takes its place
    inside = _amount(args.link, "--link", "B/s") or gpu.link
    between = _amount(args.internode, "--internode", "B/s") or min(inside, BETWEEN_NODES)
    memory = _amount(args.memory, "--memory", "B") or gpu.memory
    if memory <= RESERVED:
        raise ValueError(f"--memory {args.memory}: {RESERVED / 1e9:g} GB of each GPU are the driver's")
    return PlanRequest(subject, size, Machine(gpu, gpus, args.nodes, memory, Links(inside, between)))


def _check_tp(args: argparse.Namespace, gpus: int) -> None:
    """Beside GPUs, whose meshes have all degrees. Raises ValueError."""
    if not args.explain:
        raise ValueError("--tp with --gpus is for --explain; the meshes of the GPUs have every tp")
    if args.tp > gpus or gpus * args.nodes % args.tp:
        raise ValueError(f"--tp {args.tp}: no mesh of nodes of {gpus} GPUs has it; use a divisor of {gpus}")
    _explained(args.model, args.tp, args.dtype)


_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)(B|B/s)", re.ASCII)


def _amount(text: str | None, flag: str, unit: str) -> float | None:
    """Bytes, or bytes a second. Raises ValueError."""
    if text is None:
        return None
    match = _AMOUNT.fullmatch(text.strip())
    found = math.nan
    if match is not None and match[4] == unit:
        found = float(match[1]) * (1024 if match[3] else 1000) ** " kMGT".index(match[2] or " ")
    if not 1e3 <= found <= 1e18:
        raise ValueError(f"{flag} {text}: write 16G{unit} or 15.9Gi{unit}, say")
    return found


def _explained(model: str, tp: int, dtype: str) -> PlanReport:
    """Of any model with a plan. Raises ValueError."""
    if (subject := known_subject(model)) is not None:
        cls, config = getattr(diffusers, subject.known.cls), {**subject.known.config, **subject.config}
    else:
        folder = open_folder(model)
        cls, config = folder.denoiser(), folder.denoiser_config()
    try:
        with torch.device("meta"):
            known = {key: value for key, value in config.items() if not key.startswith("_")}  # of files: _class_name
            whole = cls.from_config(known).to(computed(dtype))
    except Exception as error:  # classes check little of their configs
        raise cannot_be_had(cls.__name__, config, error) from error
    return verify_plan(whole, tp, WEIGHT_BYTES[dtype] if dtype in QUANTIZED else None)


def run(request: PlanRequest, args: argparse.Namespace, argv: list[str]) -> int:
    if request.machine is None:
        print(_shown(args, args.tp))
        return 0
    machine = _measured(request.machine, args) if args.measure else request.machine

    def told(mesh: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[Klooking at {mesh}", end="", file=sys.stderr, flush=True)

    said = "diffusers-rocm: still looking: many GPUs and long videos take minutes"
    sign_of_life = threading.Timer(PATIENCE, lambda: sys.stderr.isatty() or print(said, file=sys.stderr))
    sign_of_life.start()
    try:
        alone = one_gpu(request.subject, request.size, machine, args.dtype, not args.eager)
        found, dropped = search(request.subject, request.size, machine, args.dtype, not args.eager, told)
        explained = _shown(args, args.tp or found[0].degrees.get("tp", 1)) if args.explain and found else None
    except ValueError as error:  # of the model's configs, which building it alone can tell
        print(f"diffusers-rocm: {error}", file=sys.stderr)
        return 2
    finally:
        sign_of_life.cancel()
    dropped += never_made(request.subject, machine)
    told("nothing more")
    if args.json:
        print(json.dumps(as_json(request, machine, found, dropped, alone), indent=1))
    else:
        print(_report(request, machine, args, found, dropped, alone))
    if explained is not None:
        print(explained)
    return 0 if found else 1


def _shown(args: argparse.Namespace, tp: int) -> str:
    text = str(_explained(args.model, tp, args.dtype))
    return text if args.explain else text.splitlines()[0]


def _measured(machine: Machine, args: argparse.Namespace) -> Machine:
    """The machine with what is measured here, but for what was said."""
    measured = measure()
    gpu = measured.gpu()
    inside = machine.links.inside if args.link else gpu.link
    between = machine.links.between if args.internode else min(inside, BETWEEN_NODES)
    return replace(
        machine, gpu=gpu, memory=machine.memory if args.memory else gpu.memory, links=Links(inside, between)
    )


def as_json(
    request: PlanRequest, machine: Machine, found: list[Candidate], dropped: list[Dropped], alone: float
) -> dict[str, Any]:
    """Seconds, bytes."""
    return {
        "model": request.subject.name,
        "size": asdict(request.size),
        "machine": asdict(machine),
        "one GPU": alone,
        "meshes": [
            {
                "mesh": dict(each.degrees),
                "rotate_method": each.rotate_method,
                "step": each.step,
                "forward": asdict(each.seconds),
                "forwards": each.forwards,
                "memory": dict(each.stages),
                "vae_tiling": each.tiled,
            }
            for each in found
        ],
        "dropped": [asdict(each) for each in dropped],
    }


def _report(
    request: PlanRequest,
    machine: Machine,
    args: argparse.Namespace,
    found: list[Candidate],
    dropped: list[Dropped],
    alone: float,
) -> str:
    size, gpu, links = request.size, machine.gpu, machine.links
    frames = f" x {size.frames} frames" if size.frames > 1 else ""
    of = "measured" if gpu.measured else "assumed from its data sheet"
    nodes = f"{machine.nodes} nodes of " if machine.nodes > 1 else ""
    between = f", {links.between / 1e9:g} GB/s between nodes" if machine.nodes > 1 else ""
    lines = [
        f"{request.subject.name}, {size.height} x {size.width}{frames}, {args.dtype}, "
        f"{request.subject.forwards} forward(s) a step, {'eager' if args.eager else 'compiled'}",
        f"{nodes}{machine.gpus} x {gpu.name} (speed {of}) with {machine.memory / 1e9:.1f} GB, "
        f"{links.inside / 1e9:g} GB/s between GPUs{between}",
        "",
    ]
    if found:
        heads = ("ms a step", "one GPU", "compute", "waiting", "encode", "denoise", "decode")
        width = max(24, *(len(str(each)) for each in found)) + 1
        lines += [
            f"{'':{width}}{'':19}{'ms of a forward':>20}{'GB of a rank to':>24}",
            f"{'mesh':{width}}" + "".join(f"{head:>10}" for head in heads) + "   waits for, ms",
        ]
        shown = found if args.all else found[:10]
        for each in shown:
            waits = {axis: seconds for axis, seconds in each.seconds.communication.items() if seconds >= 5e-5}
            waiting = ", ".join(f"{axis} {seconds * 1e3:.1f}" for axis, seconds in waits.items())
            hidden = f"; hidden {each.seconds.hidden * 1e3:.1f}" if each.seconds.hidden >= 5e-5 else ""
            milliseconds = (each.seconds.compute * 1e3, sum(each.seconds.communication.values()) * 1e3)
            gigabytes = (each.stages[stage] / 1e9 for stage in ("encode", "denoise", "decode"))
            lines.append(
                f"{each!s:{width}}{each.step * 1e3:>10.1f}{alone / each.step:>9.2f}x"
                + "".join(f"{value:>10.1f}" for value in (*milliseconds, *gigabytes))
                + f"   {waiting or 'nothing'}{hidden}"
            )
        lines += [f"{len(found) - len(shown)} more with --all"] if len(found) > len(shown) else []
        lines += [f"{'one GPU, if it had room':{width}}{alone * 1e3:>10.1f}{1:>9.2f}x"]
    if dropped:
        few = dropped if args.all else dropped[:10]
        lines += ["", "not to be had:", *(f"  {each.mesh}: {each.reason}" for each in few)]
        lines += [f"  {len(dropped) - len(few)} more with --all"] if len(dropped) > len(few) else []
    lines.append("")
    if found:
        best = found[0]
        words = [f"--{axis} {count}" for axis, count in best.degrees.items()]
        words += ["--rotate-method allgather"] * (best.rotate_method == "allgather")
        if machine.nodes > 1:
            words += [f"--nnodes {machine.nodes}", "--node-rank RANK", "--master-addr HOST"]
        words += [f"--quantization {args.dtype}"] * (args.dtype in QUANTIZATIONS)
        words += ["--dtype float16"] * (args.dtype == "float16") + ["--compile"] * (not args.eager)
        words += ["--vae-tiling"] * best.tiled
        lines.append(f"diffusers-rocm generate --model {request.subject.name} {' '.join(words)} ...")
        lines.append("Meshes within some percent of each other are alike: these are predictions, of a step alone.")
        lines += ["Seconds are those of bfloat16: dequantising is not counted."] * (args.dtype in QUANTIZED)
        lines += ["Decoding is of one tile at a time: without --vae-tiling it does not fit."] * best.tiled
    else:
        least = min((each for each in dropped if each.short_of), key=lambda each: each.short_of, default=None)
        if least is not None:
            short = f"{least.mesh} lacks the least, {least.short_of / 1e9:.1f} GB"
            lines.append(f"nothing fits; {short}: {least.way_out}")
    return "\n".join(lines)
