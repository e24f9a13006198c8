"""`diffusers-rocm bench generate`: a picture or video by each mesh, from end to end."""

import argparse
import functools
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..benchmarks.report import OF_8_BITS, Bar, where
from ..benchmarks.step import check_meshes, each_mesh, parse_mesh
from ..benchmarks.whole_run import Run, measure_runs, runs_table
from ..distributed import is_first_rank
from ..distributed.compression import EXACT
from ..distributed.mesh import AXES
from ..distributed.root_cause import record, unsuccessful
from ..pipelines.generation import GenerationRequest
from . import env, generate
from .bench_output import add_output_arguments, check_output, leave, write
from .ranks import check_nodes, on_ranks


@dataclass(frozen=True)
class RunsRequest:
    picture: GenerationRequest
    meshes: tuple[str, ...]
    repeats: int
    rounds: int


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser("generate", help="seconds of each stage of a picture, mesh by mesh")
    generate.add_arguments(parser)
    meshes = {"nargs": "+", "action": "extend", "required": True}
    parser.add_argument("--mesh", help="tp=2 ulysses=2 ..., in place of --tp, --ulysses", **meshes)
    parser.add_argument(
        "--repeats", type=int, default=3, help="pictures that are timed, after one that is not (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=2,
        help="how often all meshes are gone through, and loaded (default: %(default)s)",
    )
    add_output_arguments(parser)


def check(args: argparse.Namespace) -> RunsRequest:
    """Raises ValueError."""
    check_nodes(args)
    if any(getattr(args, name) != 1 for name in AXES):
        raise ValueError("bench generate takes its meshes from --mesh: --mesh tp=2, say")
    for name in ("repeats", "rounds"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1; got {getattr(args, name)}")
    args.prompt = args.prompt or ([] if args.prompts_file else ["a red bicycle"])
    check_output(args)
    meshes = each_mesh(args.mesh)
    world = check_meshes(meshes)
    for mesh in meshes:
        found = parse_mesh(mesh)
        for name in AXES:
            setattr(args, name, found.get(name, 1))
        generate.check_request(args)
    for name in AXES:
        setattr(args, name, 1)
    args.dp = world
    request = generate.check_request(args)
    generate.check_one_picture(request, "bench generate")
    return RunsRequest(request, meshes, args.repeats, args.rounds)


@record
def measure(request: RunsRequest, args: argparse.Namespace, argv: list[str]) -> int:
    environment, picture, so_far = functools.cache(env.collect), request.picture, {}

    # It writes no pictures.
    asked = {name: value for name, value in asdict(picture).items() if name not in (*AXES, "out", "contact_sheet")}
    asked |= {name: getattr(request, name) for name in ("meshes", "repeats", "rounds")}
    asked["model"] = Path(picture.model).name

    def measured(runs: Iterable[Run]) -> dict[str, Any]:
        return {"request": asked, "environment": environment(), "rows": [run.as_json() for run in runs]}

    def told(run: Run) -> None:
        if is_first_rank():
            said = run.note or f"{run.picture:.3f} s a picture"
            print(f"{run.mesh}: {said}", file=sys.stderr, flush=True)
            so_far.update({run.mesh: run})
            write(args, argv, measured(so_far.values()))

    runs = measure_runs(picture, request.meshes, request.repeats, request.rounds, told)
    if not is_first_rank():
        return 0
    world = check_meshes(request.meshes)
    lossy = any("communication" in parse_mesh(mesh) for mesh in request.meshes) or picture.communication != EXACT
    heading = "\n".join(
        [
            f"{Path(picture.model).name}, {picture.described()}",
            where(environment(), world, picture.device),
            f"seconds: median of {request.repeats} in each of {request.rounds} round(s){OF_8_BITS * lossy}",
        ]
    )
    bars = [Bar(run.mesh, run.picture, f"{run.picture:.3f}", times=run.pictures) for run in runs if not run.note]
    leave(args, argv, heading, runs_table(runs), measured(runs), bars, "seconds a picture")
    bad = [run.mesh for run in runs if run.note]
    return unsuccessful(f"wrong or not run, {len(bad)} of {len(runs)} rows: {'; '.join(bad)}") if bad else 0


def run(request: RunsRequest, args: argparse.Namespace, argv: list[str]) -> int:
    return on_ranks(check_meshes(request.meshes), args, argv, lambda: measure(request, args, argv))
