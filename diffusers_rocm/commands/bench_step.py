"""`diffusers-rocm bench step`: a denoising step by mesh and mode, beside one GPU and the peers."""

import argparse
import functools
import importlib.util
import json
import os
import sys
from dataclasses import asdict
from typing import Any

import diffusers
import psutil
import torch
from diffusers import ModelMixin

from ..benchmarks.known_models import KNOWN_MODELS, made
from ..benchmarks.report import bars, header, how, rows_json, table
from ..benchmarks.step import MODES, ONE, PEERS, Row, StepRequest, check_meshes, each_mesh, measure_step, parse_mesh
from ..distributed import is_first_rank
from ..distributed.collectives import COMPRESSED_FROM
from ..distributed.launching import under_torchrun
from ..distributed.root_cause import record, unsuccessful
from ..planner.subject import known_subject, open_folder
from . import env
from .bench_output import add_output_arguments, check_output, leave, write
from .generate import on_gpus
from .ranks import add_rank_arguments, check_nodes, check_world, on_ranks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `bench comm` too."""
    parser.add_argument(
        "--model",
        default="flux",
        help="of its real size, with random weights: a transformer's class or its short name here, of which there are "
        f"{', '.join(KNOWN_MODELS)}; or a pipeline's folder or id on the Hub, of which configs are read alone",
    )
    parser.add_argument("--resolution", type=int, help="the height; default: what the model is for")
    parser.add_argument("--frames", type=int, help="of a video; default: what the model is for")
    parser.add_argument("--text", type=int, help="text tokens")
    parser.add_argument(
        "--config",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="change the model: num_layers=2, say",
    )
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="default: bfloat16; float32 on a CPU"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: GPUs if there are any")
    parser.add_argument(
        "--repeats", type=int, default=8, help="times in a row that are measured (default: %(default)s)"
    )
    add_output_arguments(parser)
    add_rank_arguments(parser)


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser("step", help="milliseconds and memory of a denoising step, mesh by mesh")
    add_arguments(parser)
    parser.add_argument(
        "--mesh",
        nargs="+",
        action="extend",
        default=[],
        help="tp=4 ring=2,ulysses=2 tp=4,int8 ...; default: all GPUs by each of tp, ulysses and ring; of int8, sums "
        f"of fewer than {COMPRESSED_FROM} elements stay exact",
    )
    several = {"nargs": "+", "action": "extend", "default": []}
    parser.add_argument("--mode", choices=MODES, help="each mesh in each of these; default: eager", **several)
    parser.add_argument("--compare", metavar="PEER", help=f"the same by others: {', '.join(PEERS)}", **several)
    parser.add_argument("--guidance", action="store_true", help="a step is two forwards")
    parser.add_argument(
        "--float32-reference",
        action="store_true",
        help="compare with float32: no row may be 1.25 times as far from it as one rank is, or 1.5 times in int8",
    )
    parser.add_argument("--warmup", type=int, default=2, help="steps before the times (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=2, help="how often all rows are gone through (default: %(default)s)"
    )


def check(args: argparse.Namespace) -> StepRequest:
    """Raises ValueError."""
    check_nodes(args)
    request = check_request(args, each_mesh(args.mesh or _all_gpus(args)))
    for name in ("warmup", "rounds"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1; got {getattr(args, name)}")
    for mode in args.mode:
        if "graph" in mode and not on_gpus(args):
            raise ValueError(f"--mode {mode} needs a GPU")
    peers = tuple(dict.fromkeys(peer for word in args.compare for peer in word.split(",")))
    for peer in peers:
        if peer not in PEERS:
            raise ValueError(f"--compare {peer}: there are {', '.join(PEERS)}")
        if peer != "cache-dit" and not on_gpus(args):
            raise ValueError(f"--compare {peer} runs on GPUs: leave it out on a CPU")
    for name in ("cache_dit", "einops") if "cache-dit" in peers else ():
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"--compare cache-dit needs {name}: pip install 'cache-dit[parallelism]'")
    if args.float32_reference and request.dtype == "float32":
        raise ValueError("--float32-reference is for other dtypes, and all rows are in float32: add --dtype bfloat16")
    if any("cfg" in parse_mesh(mesh) for mesh in request.meshes) and not args.guidance:
        raise ValueError("cfg spreads the two forwards of guidance: add --guidance")
    return StepRequest(
        **vars(request)
        | {
            "modes": tuple(dict.fromkeys(args.mode)) or ("eager",),
            "peers": peers,
            "guidance": args.guidance,
            "in_float32": args.float32_reference,
            "warmup": args.warmup,
            "rounds": args.rounds,
        }
    )


def check_request(args: argparse.Namespace, meshes: tuple[str, ...]) -> StepRequest:
    """What `bench step` and `bench comm` share. Raises ValueError."""
    for name in ("resolution", "frames", "text", "repeats"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1; got {value}")
    model, config = _model(args.model)
    known = KNOWN_MODELS[model]
    if not hasattr(diffusers, known.cls):
        raise ValueError(f"diffusers {diffusers.__version__} has no {known.cls}")
    if known.text is None and (args.text is not None or getattr(args, "guidance", False)):
        raise ValueError(f"a {known.cls} takes no text: leave out --text and --guidance")
    size = known.sized(args.resolution, args.frames, args.text)
    config |= map(setting, args.config)
    dtype = args.dtype or ("bfloat16" if on_gpus(args) else "float32")
    world = check_meshes(meshes)
    _check_memory(made(known, config), getattr(torch, dtype), world, on_gpus(args))
    if under_torchrun() and world != int(os.environ["WORLD_SIZE"]):
        raise ValueError(f"--mesh {meshes[0]} is of {world} rank(s), and torchrun started another number")
    if not under_torchrun():
        check_world(world, args.nodes, on_gpus(args))
    check_output(args)
    return StepRequest(
        model=model,
        meshes=meshes,
        size=size,
        config=config,
        dtype=dtype,
        device=args.device,
        repeats=args.repeats,
    )


# How classes name the setting that says how many there are.
_BLOCKS = ("layers", "blocks", "depth")


def _check_memory(model: ModelMixin, dtype: torch.dtype, world: int, has_gpus: bool) -> None:
    """Raises ValueError where ranks on a CPU, each of which makes all of the model at first, would end the machine."""
    bytes_of_one, there = sum(x.numel() for x in model.parameters()) * dtype.itemsize, psutil.virtual_memory().total
    blocks = [name for name, value in model.config.items() if name.endswith(_BLOCKS) and isinstance(value, int)]
    if not has_gpus and world * bytes_of_one > there:
        raise ValueError(
            f"{world} ranks of {bytes_of_one / 1e9:.1f} GB each, and this machine has {there / 1e9:.1f}: make the "
            f"model smaller, by --config {' '.join(f'{name}=1' for name in blocks)}, say"
        )


def _all_gpus(args: argparse.Namespace) -> list[str]:
    count = torch.cuda.device_count() * args.nodes.count if on_gpus(args) else 0
    if count == 0:
        raise ValueError("there are no GPUs to take all of: give --mesh tp=2, say")
    return [f"{axis}={count}" for axis in ("tp", "ulysses", "ring")]


def _model(text: str) -> tuple[str, dict[str, Any]]:
    """The short name of what `--model` names, and where its config differs from the one known by that name.

    Raises:
        ValueError: there is no such pipeline, or one whose transformer is not among the known classes.
    """
    names = {known.cls: name for name, known in KNOWN_MODELS.items()}
    if text in KNOWN_MODELS or text in names:
        return names.get(text, text), {}
    if isinstance(getattr(diffusers, text, None), type):
        cls, config = text, {}
    elif (subject := known_subject(text)) is not None:
        cls, config = subject.known.cls, subject.config
    else:
        folder = open_folder(text, KNOWN_MODELS)
        cls, config = folder.denoiser_class, folder.denoiser_config()
    if cls not in names:
        raise ValueError(f"--model {text}: what a {cls} is given in a step is not known here")
    known = KNOWN_MODELS[names[cls]]
    usual = {**made(known, {}).config, **known.config}
    differs = {key: value for key, value in config.items() if usual.get(key) not in (value, _tuple(value))}
    return names[cls], {key: value for key, value in differs.items() if not key.startswith("_")}


def _tuple(value: Any) -> Any:
    """Of a list, which is how JSON has it."""
    return tuple(value) if isinstance(value, list) else value


def setting(text: str) -> tuple[str, Any]:
    """`NAME=VALUE` of `--config`, whose value is JSON or a word. Raises ValueError."""
    name, found, value = text.partition("=")
    if not found:
        raise ValueError(f"--config {text}: write NAME=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


@record
def measure(request: StepRequest, args: argparse.Namespace, argv: list[str]) -> int:
    environment, so_far = functools.cache(env.collect), {}

    def measured(rows: list[Row]) -> dict[str, Any]:
        return {"request": asdict(request), "environment": environment(), "rows": rows_json(rows)}

    def told(row: Row) -> None:
        if is_first_rank():
            print(f"{row.name}, {row.mode}: {row.note or f'{row.median:.2f} ms'}", file=sys.stderr, flush=True)
            so_far[row.name, row.mode] = row
            write(args, argv, measured([*so_far.values()]))

    rows = measure_step(request, told)
    if not is_first_rank():
        return 0
    heading = f"{header(request, environment(), check_meshes(request.meshes))}\n{how(request)}"
    leave(args, argv, heading, table(rows), measured(rows), bars(rows), "milliseconds a step")
    # What peers cannot do is none of this run's failures.
    ours = (ONE, *request.meshes)
    bad = [row for row in rows if row.note.startswith("wrong") or row.note and row.name in ours]
    peers = [row for row in rows if row.name not in ours]
    if missing := sum(row.note.startswith("not run") for row in peers):
        print(f"not run: {missing} of the peers' {len(peers)} rows", file=sys.stderr)
    if not bad:
        return 0
    names = "; ".join(f"{row.name}, {row.mode}" for row in bad)
    return unsuccessful(f"wrong or not run, {len(bad)} of {len(rows)} rows: {names}")


def run(request: StepRequest, args: argparse.Namespace, argv: list[str]) -> int:
    return on_ranks(check_meshes(request.meshes), args, argv, lambda: measure(request, args, argv))
