"""Ranks of a probe as processes of their own, killed with all that they started when their time is over.

What is tried here hangs, and brings down, processes of some machines; whoever tries it must be another.
"""

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import child


CHILD = Path(child.__file__)
# What a launcher gives its own ranks, and a store that they would look for.
_LAUNCHERS = re.compile(r"TORCHELASTIC_\w+|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|NAME)|MASTER_(ADDR|PORT)")
# How long the others of a rank that failed have to fail as well, and a killed process to end.
_PATIENCE = 3.0


@dataclass(frozen=True)
class Outcome:
    """How a probe ended.

    Attributes:
        results: by rank, what its function returned, or had found before it failed.
        failure: "" if all ranks returned; else which rank failed first, how, and at which stage.
        log: what NCCL or RCCL wrote.
    """

    results: Mapping[int, Any]
    failure: str
    log: str = ""


def run_ranks(
    function: Callable[..., Any],
    world: int,
    arguments: Mapping[str, Any],
    seconds: float,
    environment: Mapping[str, str] | None = None,
    ranks: Sequence[int] | None = None,
    meet: str = "",
) -> Outcome:
    """`function(rank, **arguments)` by each rank, in a process of its own.

    Args:
        function: of the top level of a file that imports nothing relatively; takes a `child.Rank`, and what it
            returns is written as JSON.
        seconds: after which all are killed.
        environment: in addition to this process' own.
        ranks: that are started here; all by default.
        meet: where ranks of several machines find each other, `tcp://host:port`.
    """
    ranks = range(world) if ranks is None else ranks
    with tempfile.TemporaryDirectory(prefix="diffusers_rocm_doctor_", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        order = folder / "order"
        order.write_text(
            json.dumps(
                {
                    "path": str(Path(__file__).parents[2]),
                    "file": inspect.getfile(function),
                    "function": function.__name__,
                    "world": world,
                    "meet": meet or f"file://{folder}/meet",
                    "seconds": seconds,
                    "arguments": arguments,
                }
            )
        )
        inherited = {key: value for key, value in os.environ.items() if not _LAUNCHERS.fullmatch(key)}
        inherited["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // world))
        inherited["NCCL_DEBUG_FILE"] = f"{folder}/debug.%p"
        processes: dict[int, subprocess.Popen] = {}
        try:
            for rank in ranks:
                with (folder / f"output.{rank}").open("wb") as output:
                    processes[rank] = subprocess.Popen(
                        [sys.executable, str(CHILD), str(order), str(rank)],
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        env=inherited | dict(environment or {}),
                        start_new_session=True,
                    )
            codes, late = _wait(processes, time.monotonic() + seconds)
        finally:
            stuck = _kill(processes)
        return Outcome(_results(folder), _failure(folder, codes, late, stuck, seconds), _log(folder))


def _wait(processes: Mapping[int, subprocess.Popen], deadline: float) -> tuple[dict[int, int | None], list[int]]:
    """Until all have ended: their exit codes, and which have not in their time.

    Those that wait for a rank that failed have a short time to end by themselves, and are not late.
    """
    failed = False
    while None in (codes := {rank: process.poll() for rank, process in processes.items()}).values():
        if time.monotonic() > deadline:
            break
        if not failed and any(codes.values()):
            failed, deadline = True, min(deadline, time.monotonic() + _PATIENCE)
        time.sleep(0.02)
    return codes, [] if failed else [rank for rank, code in codes.items() if code is None]


def _kill(processes: Mapping[int, subprocess.Popen]) -> list[int]:
    """Kill the sessions; which ranks do not end even so: a driver keeps them."""
    for process in processes.values():
        try:
            os.killpg(process.pid, signal.SIGKILL)  # what a rank started may be left where the rank is not
        except (ProcessLookupError, PermissionError):
            pass
    stuck = []
    for rank, process in processes.items():
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            stuck.append(rank)
    return stuck


def _results(folder: Path) -> dict[int, Any]:
    return {
        int(file.suffix[1:]): json.loads(file.read_text())
        for file in folder.glob("result.*")
        if file.suffix[1:].isdecimal()
    }


def _failure(folder: Path, codes: Mapping[int, int | None], late: list[int], stuck: list[int], seconds: float) -> str:
    def at(rank: int) -> str:
        file = folder / f"stage.{rank}"
        return f" at {file.read_text()}" if file.exists() else " before it began"

    if stuck:
        return f"rank {stuck[0]} hung{at(stuck[0])} and cannot be killed: the driver keeps it"
    if late:
        stages: dict[str, list[str]] = {}
        for rank in late:
            stages.setdefault(at(rank), []).append(f"rank {rank}")
        where = "; ".join(f"{' and '.join(ranks)} hung{stage}" for stage, ranks in stages.items())
        return f"{where}: killed after {seconds:g} s"
    errors = sorted(folder.glob("error.*"), key=lambda file: file.stat().st_mtime_ns)
    said = {int(file.suffix[1:]): file.read_text() for file in errors if file.suffix[1:].isdecimal()}
    died = {rank: code for rank, code in codes.items() if code and rank not in said}
    # A rank that loses another says so, or is aborted by its library: one that died otherwise went before it.
    for rank in sorted(died, key=lambda rank: died[rank] == -signal.SIGABRT):
        if said and died[rank] == -signal.SIGABRT:
            break
        how = f"was killed by {signal.Signals(-died[rank]).name}" if died[rank] < 0 else f"ended with {died[rank]}"
        return f"rank {rank} {how}{at(rank)}"
    for rank, text in said.items():
        return f"rank {rank} failed{at(rank)}: {text[:300]}"
    return ""


def _log(folder: Path) -> str:
    return "\n".join(file.read_text(errors="replace")[: 1 << 20] for file in sorted(folder.glob("debug.*")))
