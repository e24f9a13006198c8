"""`diffusers-rocm bench KIND`: what a run takes, of memory and of time."""

import argparse
from typing import Any

from . import bench_comm, bench_generate, bench_memory, bench_step


KINDS = {"memory": bench_memory, "step": bench_step, "comm": bench_comm, "generate": bench_generate}


def add_parser(subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser("bench", help="measure what a run takes")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for kind in KINDS.values():
        kind.add_parser(kinds)
    return parser


def check(args: argparse.Namespace) -> Any:
    """Raises ValueError."""
    return KINDS[args.kind].check(args)


def run(request: Any, args: argparse.Namespace, argv: list[str]) -> int:
    return KINDS[args.kind].run(request, args, argv)
