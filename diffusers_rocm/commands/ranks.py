"""What the commands that start ranks share: on which nodes, and how loud."""

import argparse
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..distributed.environment import LOG_LEVELS
from ..distributed.launching import check_port, end_rank, launch, under_torchrun
from ..distributed.nodes import Nodes
from ..distributed.slurm import slurm_nodes, slurm_rank


DEFAULT_PORT = 29500  # torchrun's


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nnodes", type=int, help="run the same command on so many nodes (default: Slurm's, or 1)")
    parser.add_argument("--node-rank", type=int, help="which of the nodes this one is; node 0 writes what is made")
    parser.add_argument("--master-addr", metavar="HOST", help="of node 0, as the others reach it")
    parser.add_argument(
        "--port", type=int, help=f"of node 0, where all meet (default: {DEFAULT_PORT}; on one node any free one)"
    )
    parser.add_argument(
        "--node-timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="how long to wait for the other nodes (default: %(default)g)",
    )
    parser.add_argument("--log-dir", type=Path, help="keep what each rank says, in a file of its own")
    parser.add_argument("--log-level", choices=LOG_LEVELS, help="default: warning")
    parser.add_argument("--verbose", action="store_true", help="the same as --log-level info")


def set_up_logging(args: argparse.Namespace) -> None:
    """Of the package, on stderr; the ranks inherit what torch is told."""
    level = args.log_level or ("info" if args.verbose else "warning")
    for name, value in LOG_LEVELS[level].items():
        os.environ.setdefault(name, value)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logger = logging.getLogger(__package__.partition(".")[0])
    logger.handlers = [handler]
    logger.setLevel(level.upper())


def check_nodes(args: argparse.Namespace) -> None:
    """Sets `args.nodes`, the nodes that there are: as given, else by Slurm's variables, else this machine alone.

    A task that srun started for each GPU is made a rank.

    Raises:
        ValueError: what is given makes no set of nodes, or cannot be used on this one.
    """
    if args.log_dir is not None and not under_torchrun():
        check_writable(args.log_dir)
    if not 0 < args.node_timeout < 1e7:
        raise ValueError(f"--node-timeout must be a number of seconds above 0; got {args.node_timeout:g}")
    if args.port is not None and not 0 <= args.port < 65536:
        raise ValueError(f"--port {args.port} is not a port number (0 to 65535)")
    given = {name: getattr(args, name) for name in ("nnodes", "node_rank", "master_addr")}
    if all(value is None for value in given.values()) and not under_torchrun():
        os.environ.update(slurm_rank(os.environ, args.port or DEFAULT_PORT, torch.cuda.device_count()))
    if under_torchrun():
        check_rank(os.environ)
        world = int(os.environ["WORLD_SIZE"])
        args.nodes = Nodes(count=max(1, world // int(os.environ.get("LOCAL_WORLD_SIZE", world))))
        return
    if all(value is None for value in given.values()):
        given = dict(zip(given, slurm_nodes(os.environ) or (1, 0, None), strict=True))
    count, rank, address = given.values()
    if count is None:
        raise ValueError("--node-rank and --master-addr are for several nodes: give --nnodes as well")
    if count < 1:
        raise ValueError(f"--nnodes must be at least 1; got {count}")
    if count == 1:
        if rank:
            raise ValueError(f"--node-rank {rank}, and --nnodes is 1: nodes are counted from 0")
        check_port(args.port or 0)
        args.nodes = Nodes(port=args.port or 0)
        return
    if rank is None or address is None:
        missing = "--node-rank" if rank is None else "--master-addr"
        raise ValueError(f"--nnodes {count} needs {missing}; outside Slurm nothing else says it")
    if not 0 <= rank < count:
        raise ValueError(f"--node-rank {rank}: {count} nodes are numbered from 0 to {count - 1}")
    port = args.port or DEFAULT_PORT
    if rank == 0:  # the others wait for it, and for its name to be known: a node of Kubernetes has none before it runs
        try:
            socket.getaddrinfo(address, port)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"--master-addr {address!r}: {reason}") from None
        check_port(port)
    args.nodes = Nodes(count, rank, address, port, args.node_timeout)


def check_rank(environment: Mapping[str, str]) -> None:
    """Raises ValueError where torchrun's variables, which make this process a rank, are not what torchrun sets."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_PORT")
    found = {name: environment.get(name) for name in names}
    numbers = {name: int(value) for name, value in found.items() if value is not None and value.isdecimal()}
    rank, world = numbers.get("RANK", -1), numbers.get("WORLD_SIZE", 0)
    wrong = [name for name, value in found.items() if value is not None and name not in numbers]
    wrong += [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    wrong += ["MASTER_PORT"] if numbers.get("MASTER_PORT", 0) > 65535 else []
    if wrong or not 0 <= rank < world or not 1 <= numbers.get("LOCAL_WORLD_SIZE", world) <= world:
        shown = ", ".join(f"{name}={value}" for name, value in found.items() if value is not None)
        lacking = f", without {wrong[0]}" if wrong and not environment.get(wrong[0]) else ""
        raise ValueError(f"{shown}{lacking}: not what torchrun sets for a rank; unset RANK to start ranks from here")


def check_writable(folder: Path) -> None:
    """Make it, if it is not there. Raises ValueError where it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"cannot write to {folder}: {error.strerror}") from None


def check_world(world: int, nodes: Nodes, on_gpus: bool) -> None:
    """Raises ValueError where so many ranks do not fit on the nodes, of which this one has as many GPUs as all."""
    if world % nodes.count:
        raise ValueError(f"{world} ranks cannot be shared equally by {nodes.count} nodes")
    wanted, count = world // nodes.count, torch.cuda.device_count()
    if on_gpus and wanted > count:
        where = " on each node" if nodes.count > 1 else ""
        raise ValueError(f"{wanted} ranks{where} need as many GPUs and {count} are visible; --device cpu needs none")


def launch_options(args: argparse.Namespace) -> dict[str, Any]:
    """What `launch` is told."""
    return {"nodes": args.nodes, "log_dir": args.log_dir, "restarts": getattr(args, "restarts", 0)}


def on_ranks(world: int, args: argparse.Namespace, argv: list[str], work: Callable[[], int]) -> int:
    """Do the work on so many ranks, starting them if they are not there. Returns the exit code."""
    if world > 1 and not under_torchrun():
        return launch(world, ["diffusers_rocm", *argv], **launch_options(args))
    code = work()
    if under_torchrun():
        end_rank(code)
    return code
