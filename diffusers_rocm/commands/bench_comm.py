"""`diffusers-rocm bench comm`: the collectives of a model's step, at the sizes that it sends."""

import argparse
from dataclasses import asdict

from ..benchmarks.comm import IN_A_ROW, comm_table, measure_comm
from ..benchmarks.report import Bar, header
from ..benchmarks.step import StepRequest, check_meshes, each_mesh, parse_mesh
from ..distributed import is_first_rank
from ..distributed.root_cause import record, unsuccessful
from . import bench_step, env
from .bench_output import leave
from .ranks import check_nodes, on_ranks


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser("comm", help="what the collectives of a step take on this machine's links")
    bench_step.add_arguments(parser)
    parser.add_argument("--mesh", nargs="+", action="extend", required=True, help="tp=4 ring=2,ulysses=2 ...")


def check(args: argparse.Namespace) -> StepRequest:
    """Raises ValueError."""
    meshes = each_mesh(args.mesh)
    if check_meshes(meshes) == 1:
        raise ValueError(f"--mesh {meshes[0]}: one rank sends nothing")
    for mesh in meshes:
        if "cfg" in parse_mesh(mesh):
            raise ValueError(f"--mesh {mesh}: cfg exchanges once a step, and measured is one forward: leave it out")
    check_nodes(args)
    return bench_step.check_request(args, meshes)


@record
def measure(request: StepRequest, args: argparse.Namespace, argv: list[str]) -> int:
    found = measure_comm(request)
    if not is_first_rank():
        return 0
    environment = env.collect()
    heading = (
        f"{header(request, environment, check_meshes(request.meshes))}\none eager forward, by the process group; "
        f"median (least to most) of {request.repeats} times {IN_A_ROW} in a row"
    )
    measured = {
        "request": asdict(request),
        "environment": environment,
        "meshes": [
            asdict(of_mesh) | {"collectives": [asdict(each) | {"median": each.median} for each in of_mesh.collectives]}
            for of_mesh in found
        ],
    }
    bars = [
        Bar(
            name=f"{of_mesh.mesh}, {each.title}, {max(each.sent) / 1e6:.3f} MB",
            value=each.median,
            said=f"{each.median:.0f}",
            kind=each.title,
            times=each.microseconds,
        )
        for of_mesh in found
        for each in of_mesh.collectives
    ]
    leave(args, argv, heading, comm_table(found), measured, bars, "microseconds")
    bad = [of_mesh.mesh for of_mesh in found if of_mesh.note or of_mesh.unchecked]
    return (
        unsuccessful(f"wrong, unchecked or not run, {len(bad)} of {len(found)} meshes: {'; '.join(bad)}") if bad else 0
    )


def run(request: StepRequest, args: argparse.Namespace, argv: list[str]) -> int:
    return on_ranks(check_meshes(request.meshes), args, argv, lambda: measure(request, args, argv))
