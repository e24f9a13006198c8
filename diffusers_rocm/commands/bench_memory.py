"""`diffusers-rocm bench memory`: the peaks of memory of each rank, stage by stage."""

import argparse
import math
import sys
from pathlib import Path

from ..benchmarks.memory import measure_memory, report
from ..benchmarks.report import OF_8_BITS, Bar, where
from ..benchmarks.step import parse_mesh
from ..distributed import is_first_rank
from ..distributed.compression import EXACT
from ..distributed.launching import under_torchrun
from ..distributed.mesh import AXES
from ..distributed.root_cause import record, unsuccessful
from ..hooks.step_graph import WARM_UP
from ..pipelines.generation import GenerationRequest
from ..pipelines.model_folder import EMBEDDED_MODEL
from ..pipelines.random_pipeline import write_flux_configs, write_random_flux
from . import env, generate
from .bench_output import add_output_arguments, check_output, leave
from .ranks import check_nodes, check_writable, on_ranks


def add_parser(subparsers) -> None:
    memory = subparsers.add_parser("memory", help="peaks of memory, of each rank and stage, while one picture is made")
    generate.add_arguments(memory)
    memory.add_argument(
        "--mesh",
        nargs="+",
        action="extend",
        default=[],
        help="tp=2,ulysses=2, say, in place of --tp, --ulysses; one in a run",
    )
    memory.add_argument(
        "--write-random-flux",
        action="store_true",
        help="first write a pipeline of FLUX.1-dev's size with random weights (34 GB) to --model, if it is not there",
    )
    add_output_arguments(memory)
    memory.set_defaults(steps=None)


def check(args: argparse.Namespace) -> GenerationRequest:
    """Raises ValueError."""
    check_nodes(args)
    check_output(args)
    if len(args.mesh) > 1:
        raise ValueError(f"bench memory runs one mesh, and --mesh gives {len(args.mesh)}: run it once for each")
    for mesh in args.mesh:
        if any(getattr(args, name) != 1 for name in AXES):
            raise ValueError(f"bench memory takes its mesh from --mesh {mesh}, or from --tp and the like")
        for name, value in parse_mesh(mesh).items():
            setattr(args, name, value)
    if args.steps is None:
        args.steps = WARM_UP + 2 if args.graph else 2  # so that one of them is replayed
    args.prompt = args.prompt or ([] if args.prompts_file else ["a red bicycle"])
    writes = args.write_random_flux and not under_torchrun()  # once, before there are ranks
    if writes:
        if Path(args.model).resolve() == EMBEDDED_MODEL.resolve():
            raise ValueError("--write-random-flux needs a folder to write to: --model FOLDER")
        check_writable(Path(args.model))
        write_flux_configs(Path(args.model))
    request = generate.check_request(args)  # it writes no picture
    generate.check_one_picture(request, "bench memory")
    if writes:
        print(f"random weights are in {args.model}, or are written there now", file=sys.stderr)
        write_random_flux(Path(args.model))
    return request


@record
@generate.unless_refused
def measure(request: GenerationRequest, args: argparse.Namespace, argv: list[str]) -> int:
    measured = measure_memory(request)
    measured["request"]["model"] = Path(request.model).name
    if not is_first_rank():
        return 0
    environment = env.collect()
    what, peaks = report(measured).split("\n", 1)
    heading = f"{what}\n{request.described()}\n{where(environment, len(measured['weights']), request.device)}"
    heading += OF_8_BITS * (request.communication != EXACT)
    kind = "host" if measured["device"] == "CPU" else "device"
    most = {stage: max(of[kind]) / 2**30 for stage, of in measured["peaks"].items()}
    bars = [Bar(stage, value, f"{value:.2f}") for stage, value in most.items()]
    leave(args, argv, heading, peaks, {"environment": environment, **measured}, bars, "peak GiB a rank")
    return unsuccessful(f"wrong: {measured['wrong']}") if measured["wrong"] else 0


def run(request: GenerationRequest, args: argparse.Namespace, argv: list[str]) -> int:
    world = math.prod(getattr(request, name) for name in AXES)
    return on_ranks(world, args, argv, lambda: measure(request, args, argv))
