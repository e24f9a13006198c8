"""Start a command's own ranks through torchrun's launcher, on this machine or on this node's part, and speak for them.

When a rank fails the others are ended, and the last line is that rank's own error (`root_cause`).
"""

import logging
import math
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import LaunchConfig, elastic_launch

from .environment import prepare
from .nodes import Meeting, Nodes, NodesFailed
from .rank_output import Forwarder
from .root_cause import Cause, root_cause


def under_torchrun() -> bool:
    """Is this process a rank already?"""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def check_port(port: int) -> None:
    """Raises ValueError where the port cannot be listened on."""
    if not 0 <= port < 65536:
        raise ValueError(f"--port {port} is not a port number (0 to 65535)")
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("localhost", port))
        except OSError as error:
            raise ValueError(f"--port {port}: {error.strerror}; leave it out to take any free one") from None


def launch(
    world: int,
    module_and_arguments: Sequence[str],
    nodes: Nodes | None = None,
    restarts: int = 0,
    log_dir: Path | None = None,
) -> int:
    """Run `python -m MODULE ARGUMENTS...` on `world` ranks, on this machine or as one node of several.

    Args:
        world: ranks of all nodes, each of which has as many.
        nodes: default: this machine alone.
        restarts: how often all ranks are started anew after one of them failed.
        log_dir: keeps what each rank says, and of a timeout the flight recorder of NCCL or RCCL.

    Returns:
        The exit code of the whole.
    """
    nodes, first = nodes or Nodes(), 0
    local = world // nodes.count
    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        # What ends the run is said better below, by the last line; not so what ends an attempt before it.
        logging.getLogger(name).setLevel(logging.ERROR if restarts else logging.CRITICAL)
    with ExitStack() as stack:
        if log_dir is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="diffusers_rocm_")))
        else:
            folder = log_dir / (time.strftime("%Y%m%d-%H%M%S") + f"-node{nodes.rank}" * (nodes.count > 1))
            folder.mkdir(parents=True, exist_ok=True)
            stack.callback(print, f"logs of each rank: {folder}", file=sys.stderr, flush=True)
        prepare(local, None if log_dir is None else folder)
        meeting = None
        try:
            if nodes.count > 1:
                meeting, first = Meeting(nodes, local), nodes.rank * local
                stack.callback(meeting.close)
            config = _config(nodes, meeting, local, restarts, folder)
            with Forwarder(folder, first):
                failure, code = _run(config, module_and_arguments, folder, first)
        except NodesFailed as error:
            failure, code = Cause(str(error)), 1
        except KeyboardInterrupt:
            failure, code = Cause("stopped by SIGINT"), 130
        if failure is None:
            return 0
        said = failure.text
        if meeting is not None:
            said = meeting.settle(failure)
            code = code if said == failure.text else 1
    print(f"diffusers-rocm: {said}", file=sys.stderr, flush=True)
    return code


def _config(nodes: Nodes, meeting: Meeting | None, local: int, restarts: int, folder: Path) -> LaunchConfig:
    """torchrun's; sets what the launcher, and the ranks, read from the environment."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // local)))
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    os.environ.setdefault("COLUMNS", str(shutil.get_terminal_size().columns))
    # The launcher gives the ranks 30 s to end by themselves; a rank in a collective, or a stopped one, never would.
    # The config reads it for a launcher that is ended itself; for one whose rank failed it is a default alone.
    patience = os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3")
    PContext.close.__defaults__ = (None, int(patience))
    # A rank whose NCCL or RCCL timed out spends four times this on a dump before it ends: a minute, by default.
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "2000")
    # Ranks that are started anew in the launcher's own store find there what those before them left, and hang. A store
    # of their own opens a port that was free when the launcher looked, seconds before, and may be taken by then.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1" if restarts else "0"
    options = {"local_addr": "localhost"}
    if meeting is not None:
        if meeting.interface is not None:
            # Gloo takes the address that this node's name has here, which may be one of nobody else's.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", meeting.interface)
        options = {
            "rdzv_configs": {"is_host": "0", "join_timeout": str(math.ceil(nodes.timeout))},
            # Nodes are numbered in the order of these; that of node 0 is where its ranks are met.
            "local_addr": nodes.address if nodes.rank == 0 else f"{nodes.address}#{nodes.rank:06d}",
        }
    return LaunchConfig(
        min_nodes=nodes.count,
        max_nodes=nodes.count,
        nproc_per_node=local,
        run_id="ranks",
        rdzv_backend="c10d",
        rdzv_endpoint=f"localhost:{nodes.port}" if nodes.rank == 0 else nodes.endpoint,
        max_restarts=restarts,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder), redirects=Std.ALL),
        **options,
    )


def _run(
    config: LaunchConfig, module_and_arguments: Sequence[str], folder: Path, first: int
) -> tuple[Cause | None, int]:
    """Start the ranks and wait for them: why they failed, if they did, and the exit code."""
    # A terminal's Ctrl-C reaches the ranks as well; it is for the launcher alone to act on it.
    deaf = ("-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-m", *module_and_arguments)
    try:
        elastic_launch(config, "/bin/sh")(*deaf)
        return None, 0
    except ChildFailedError as error:
        return root_cause(error, folder, first), 1
    except SignalException as error:
        return Cause(f"stopped by {error.sigval.name}"), 128 + error.sigval
    except RendezvousError as error:
        return Cause(f"the launchers lost each other: {error}", is_own=False), 1


def end_rank(code: int = 0) -> NoReturn:
    """Leave the group, and the process: it has nothing to do any more.

    Without the interpreter's own end, in which threads of a process group that are still there abort the process.
    """
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
