"""Start a command's own ranks on this machine, through torchrun's launcher, and speak for them.

Rank 0's output passes as it is, progress bars included. What the other ranks print is prefixed with their rank, and
not repeated where another rank printed the same line. When a rank fails the others are ended, and the last line is
that rank's own error.
"""

import json
import logging
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, TextIO

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import LaunchConfig, elastic_launch

from . import name_ranks


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


def launch(world: int, module_and_arguments: Sequence[str], port: int = 0) -> int:
    """Run `python -m MODULE ARGUMENTS...` on `world` ranks of this machine; the exit code of the whole."""
    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what it says of a failure is said better below
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world)))
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    os.environ.setdefault("COLUMNS", str(shutil.get_terminal_size().columns))
    # The launcher gives the ranks 30 s to end by themselves; a rank in a collective, or a stopped one, never would.
    # The config reads it for a launcher that is ended itself; for one whose rank failed it is a default alone.
    patience = os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3")
    PContext.close.__defaults__ = (None, int(patience))
    # A rank whose NCCL or RCCL timed out spends four times this on a dump before it ends: a minute, by default.
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "2000")
    with tempfile.TemporaryDirectory(prefix="diffusers_rocm_") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=f"localhost:{port}",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=Std.ALL),
        )
        with _Forwarder(Path(folder)):
            try:
                # A terminal's Ctrl-C reaches the ranks as well; it is for the launcher alone to act on it.
                deaf = ("-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-m", *module_and_arguments)
                elastic_launch(config, "/bin/sh")(*deaf)
                return 0
            except ChildFailedError as error:
                failure, code = _root_cause(error, Path(folder)), 1
            except SignalException as error:
                failure, code = f"stopped by {error.sigval.name}", 128 + error.sigval
            except KeyboardInterrupt:
                failure, code = "stopped by SIGINT", 130
    print(f"diffusers-rocm: {failure}", file=sys.stderr, flush=True)
    return code


# What Gloo, the store and the watchdog of NCCL (RCCL) say of a rank that waited too long, in milliseconds.
_WAITED = re.compile(rb"(?:Timed out waiting |wait timeout after |collective operation timeout.*Timeout\(ms\)=)(\d+)")


def _root_cause(error: ChildFailedError, folder: Path) -> str:
    """What the first rank to fail said.

    Those that lost it in the middle of a collective fail after it, with an error of their own. A rank that died
    without one (killed, or ended from outside Python) went before them.
    """
    errors = {int(file.parent.name): file for file in folder.glob("**/error.json")}
    first = min(errors, key=lambda rank: errors[rank].stat().st_mtime_ns, default=None)
    found = {int(file.parent.name): _WAITED.search(file.read_bytes()) for file in folder.glob("**/stderr.log")}
    waited = {rank: int(match[1]) / 1000 for rank, match in sorted(found.items()) if match}
    if waited and (first is None or first in waited):
        # At the launcher's SIGTERM a rank that waits ends; one that is stopped has to be killed.
        killed = [rank for rank, failure in error.failures.items() if failure.exitcode == -signal.SIGKILL]
        late = sorted(killed or found.keys() - waited.keys())
        whom = name_ranks(late) if late else "each other"
        return (
            f"{name_ranks(waited)} waited {max(waited.values()):g} s for {whom}: stopped, hung, or only slow? "
            "--timeout MINUTES has all ranks wait longer"
        )
    for rank, failure in sorted(error.failures.items()):
        if rank in errors or failure.exitcode == -signal.SIGTERM:
            continue
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            hint = " (out of host memory?)" if failure.exitcode == -signal.SIGKILL else ""
            return f"rank {rank} was killed by {name}{hint}"
        return f"rank {rank} failed with exit code {failure.exitcode}"
    message = json.loads(errors[first].read_text())["message"]
    message = message["message"] if isinstance(message, dict) else message
    ended = [rank for rank, failure in sorted(error.failures.items()) if failure.exitcode == -signal.SIGTERM]
    if ended and re.search("[Cc]onnection (reset|closed|refused)", message):
        # Who lost a peer is not the cause. The launcher ends ranks by SIGTERM too, but only after a first failure.
        return f"rank {ended[0]} was killed by SIGTERM"
    return f"rank {first} failed: {message}"


class _Forwarder:
    """Reads the files that the ranks write to and prints them, as the module says."""

    # "[rank1]:", and the "W1121 10:53:57.929000 3522 " of torch's own log lines, differ where the line does not.
    _NOISE = re.compile(rb"^\[rank\d+\]:\s?|^[IWEF]\d{4} [\d:.]+ \d+ |\b0x[0-9a-f]+\b")

    # How long a line of another rank waits for rank 0 to say the same.
    _PATIENCE = 10.0

    def __init__(self, folder: Path):
        self._folder, self._stop = folder, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._offsets: dict[Path, int] = {}
        self._unfinished: dict[Path, bytes] = {}
        self._waiting: list[tuple[float, int, bytes, TextIO | None]] = []
        self._gone: list[TextIO] = []
        self._seen: set[bytes] = set()

    def __enter__(self) -> "_Forwarder":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()
        self._forward(last=True)

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            self._forward()

    def _write(self, target: TextIO | None, data: bytes) -> None:
        """To a stream that may be closed, or a pipe that nobody reads: the other one must still be served."""
        if target is None or target in self._gone:
            return
        try:
            target.buffer.write(data)
            target.buffer.flush()
        except (OSError, ValueError):
            self._gone.append(target)

    def _forward(self, last: bool = False) -> None:
        for file in sorted(self._folder.glob("**/std*.log"), key=lambda file: int(file.parent.name)):
            with file.open("rb") as stream:
                stream.seek(self._offsets.get(file, 0))
                text = stream.read()
            self._offsets[file] = self._offsets.get(file, 0) + len(text)
            rank, target = int(file.parent.name), sys.stdout if file.name == "stdout.log" else sys.stderr
            *lines, rest = (self._unfinished.get(file, b"") + text).split(b"\n")
            if last and rest:
                lines, rest = [*lines, rest], b""
            self._unfinished[file] = rest
            if rank == 0:
                self._seen.update(self._NOISE.sub(b"", line) for line in lines)
                self._write(target, text)
            else:
                self._waiting += [(time.monotonic(), rank, line, target) for line in lines if line.strip()]
        due = len(self._waiting)
        if not last:
            due = sum(since + self._PATIENCE < time.monotonic() for since, *_ in self._waiting)
        for _, rank, line, target in self._waiting[:due]:
            key = self._NOISE.sub(b"", line)
            if key not in self._seen:
                self._seen.add(key)
                self._write(target, b"[rank %d] %s\n" % (rank, line))
        del self._waiting[:due]


def end_rank() -> NoReturn:
    """Leave the group, and the process: it has nothing to do any more.

    Without the interpreter's own end, in which threads of a process group that are still there abort the process.
    """
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
