"""`diffusers-rocm doctor`: what is wrong with this machine, and the command that mends it."""

import argparse
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from ..distributed import init
from ..distributed.launching import end_rank, under_torchrun
from ..doctor.across_nodes import Place, across_nodes
from ..doctor.finding import SKIPPED, Finding, as_json, exit_code, line, problem, summary
from ..doctor.machine import Machine, TorchBuild
from ..doctor.privacy import without_names
from ..doctor.probes import ask_torch, run_probes
from ..doctor.static import static_checks
from . import env
from .ranks import check_rank


@dataclass(frozen=True)
class DoctorRequest:
    """
    Attributes:
        build: what torch says of itself.
        failure: how it failed to, or "".
        device: "cuda" or "cpu", of the probes.
        gpus: how many ranks they have.
    """

    build: TorchBuild
    failure: str
    device: str
    gpus: int


def add_parser(subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "doctor", help="what is wrong with this machine, and how to mend it; under torchrun, with these nodes"
    )
    parser.add_argument("--static", action="store_true", help="only look: nothing is tried on the devices")
    parser.add_argument("--gpus", type=int, help="how many to try (default: all; on a CPU 2 ranks)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPUs if there are any (ROCm: cuda)")
    parser.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        help="seconds after which what is tried is killed (default: %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    return parser


def check(args: argparse.Namespace) -> DoctorRequest:
    """Raises ValueError."""
    if not 1 <= args.timeout <= 3600:
        raise ValueError(f"--timeout must be from 1 to 3600 seconds; got {args.timeout}")
    if args.gpus is not None and args.gpus < 1:
        raise ValueError(f"--gpus must be at least 1; got {args.gpus}")
    if args.gpus is not None and under_torchrun():
        raise ValueError("--gpus: torchrun has started the ranks; leave it out")
    if under_torchrun():
        check_rank(os.environ)
        meet(args.timeout)
    build, failure = ask_torch(args.timeout)
    count = len(build.devices)
    device = args.device or ("cuda" if count or failure else "cpu")
    if device == "cuda" and not failure and (args.gpus or 1) > count:
        raise ValueError(f"--gpus {args.gpus or 1}: {count} are visible; --device cpu needs none")
    return DoctorRequest(build, failure, device, args.gpus or (2 if device == "cpu" else count))


def meet(seconds: float) -> None:
    """Join the other ranks, which torchrun has started together.

    Raises:
        ValueError: they have not met in this time.
    """
    address, port, deadline = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), time.monotonic() + seconds
    try:
        while int(os.environ["RANK"]):  # until somebody listens: torch would fill the screen with its attempts
            try:
                socket.create_connection((address, port), timeout=seconds).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.2)
        init("cpu", timeout=timedelta(seconds=seconds))
    except (OSError, RuntimeError, UnicodeError) as error:
        why = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} waited {seconds:g} s for the others at "
            f"{address}:{port}: {why}; does doctor run on every node? --timeout waits longer"
        ) from None
    # From here on each is waited for while it asks torch and tries its devices.
    dist.group.WORLD.set_timeout(timedelta(seconds=2 * seconds + 60))


def run(request: DoctorRequest, args: argparse.Namespace, argv: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what is being tried ends too
    findings = []
    for finding in diagnose(request, args):
        findings.append(finding)
        if not args.json and finding.status != SKIPPED and _speaks():
            print(line(finding), flush=True)
    if _speaks():
        content = {"versions": env.packages(), "findings": as_json(findings), "exit_code": exit_code(findings)}
        print(json.dumps(content, indent=2) if args.json else summary(findings), flush=True)
    code = exit_code(findings)
    if under_torchrun() and code == 0:
        end_rank()
    return code


def clean(text: str) -> str:
    """The text without the user, this machine, and the one where the ranks meet."""
    first = os.environ.get("MASTER_ADDR")
    return without_names(text.replace(first, "HOST") if first else text)


def _speaks() -> bool:
    return int(os.environ.get("RANK", 0)) == 0 if under_torchrun() else True


def diagnose(request: DoctorRequest, args: argparse.Namespace) -> Iterator[Finding]:
    """Findings that name nobody. Their fixes are our own words, and are left as they are."""
    machine = Machine(request.build)
    if under_torchrun():
        mine = Place(
            node=int(os.environ.get("GROUP_RANK", 0)),
            local_rank=int(os.environ.get("LOCAL_RANK", 0)),
            device=request.device,
            rdma=bool(machine.rdma_devices),
            static=as_json([*_torch_answers(request), *static_checks(machine)]),
            versions=env.packages() | {"CUDA": str(torch.version.cuda), "ROCm": str(torch.version.hip)},
            settings=env.settings(),
        )
        yield from across_nodes(mine, args.timeout, not args.static, clean)
        return
    for finding in _of_this_machine(request, args, machine):
        yield replace(finding, seen=clean(finding.seen))


def _of_this_machine(request: DoctorRequest, args: argparse.Namespace, machine: Machine) -> Iterator[Finding]:
    yield from _torch_answers(request)
    yield from static_checks(machine)
    if not args.static and (not request.failure or request.device == "cpu"):
        yield from run_probes(request.build, request.device, request.gpus, args.timeout, machine.environment)


def _torch_answers(request: DoctorRequest) -> Iterator[Finding]:
    if request.failure:
        fix = 'python -c "import torch; print(torch.cuda.device_count(), torch.zeros(1).cuda())"'
        yield replace(problem(f"torch could not be asked: {request.failure}", fix), name="torch answers")
