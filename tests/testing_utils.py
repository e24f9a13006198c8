"""Ranks for tests: real processes and real collectives, kept between cases so that the suite stays fast."""

import atexit
import io
import math
import os
import signal
import subprocess
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers.models.attention_dispatch import _AttentionBackendRegistry

from diffusers_rocm.distributed import choices


_RUNS_SLOW = os.environ.get("RUN_SLOW") == "1"


def slow(test):
    """Runs with RUN_SLOW=1 only."""
    return unittest.skipUnless(_RUNS_SLOW, "slow: set RUN_SLOW=1")(test)


def slow_unless(quick: bool) -> None:
    """Of a test of many cases, those that are not `quick` run with RUN_SLOW=1 only."""
    if not (quick or _RUNS_SLOW):
        raise unittest.SkipTest("slow: set RUN_SLOW=1")


def require_torch_accelerator(test):
    """Runs where an accelerator is visible."""
    return unittest.skipUnless(torch.accelerator.is_available(), "needs an accelerator")(test)


def require_torch_accelerators(count: int):
    """Runs where at least `count` accelerators are visible."""
    found = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    return unittest.skipUnless(found >= count, f"needs at least {count} accelerators, found {found}")


def require_torch_multi_accelerator(test):
    """Runs where at least two accelerators are visible."""
    return require_torch_accelerators(2)(test)


def relative_l2(x: torch.Tensor, reference: torch.Tensor) -> float:
    """Always a number: the largest of several errors would hide one that is none."""
    error = ((x.double() - reference.double()).norm() / reference.double().norm()).item()
    assert not math.isnan(error), "NaN on one side, or a reference of zeros"
    return error


def message_of(function: Callable, *args: Any, **kwargs: Any) -> str:
    """The message of the ValueError that the call must raise."""
    with pytest.raises(ValueError) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message, message
    return message


def in_process(run: Callable[[], int]) -> subprocess.CompletedProcess:
    """What a command, or a launcher, says in this process, which has imported everything; its ranks are their own."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with redirect_stdout(out), redirect_stderr(err), mock.patch.dict(os.environ):
            code = run()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    said, errors = (stream.buffer.getvalue().decode() for stream in (out, err))
    return subprocess.CompletedProcess([], code, said, errors)


class TwoHosts(unittest.TestCase):
    """Two network namespaces, `self.names`, are two hosts as far as the network goes: 10.77.0.1 and 10.77.0.2."""

    def setUp(self):
        super().setUp()
        self.names = [f"rocm{os.getpid()}{side}" for side in "ab"]
        commands = [f"ip netns add {name}" for name in self.names]
        commands.append(f"ip link add {self.names[0]} type veth peer name {self.names[1]}")
        for number, name in enumerate(self.names, 1):
            commands += [
                f"ip link set {name} netns {name}",
                f"ip netns exec {name} ip addr add 10.77.0.{number}/24 dev {name}",
                f"ip netns exec {name} ip link set {name} up",
                f"ip netns exec {name} ip link set lo up",
            ]
        self.addCleanup(self._remove)
        try:
            for command in commands:
                subprocess.run(command.split(), check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', '') or error}")

    def _remove(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


class RanksFailed(AssertionError):
    """At least one rank raised; the message holds every rank's traceback."""


class NoGroup(RanksFailed):
    """The ranks could not connect: nothing of the test has run on the rank that says so."""


class _NotConnected(str):
    """The traceback of such a rank."""


class RankPool:
    """Processes that become the ranks of a fresh group for each case: over Gloo, or NCCL for accelerators."""

    def __init__(self):
        self._workers: list[tuple[Any, Connection]] = []

    def _start(self, count: int) -> None:
        if torch.accelerator.is_available():
            context = get_context("spawn")  # a device may not be known in a process before it is forked
        else:
            context = get_context("forkserver")
            context.set_forkserver_preload(["diffusers_rocm", __name__])
        while len(self._workers) < count:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._workers.append((process, ours))

    def close(self) -> None:
        for process, _ in self._workers:
            process.kill()
        self._workers.clear()

    def run(self, world: int, function: Callable, *args: Any, timeout: float = 240, device: str = "cpu") -> list[Any]:
        """`function(*args)` on ranks 0 to world - 1 of a new group; their results in rank order.

        Raises:
            RanksFailed: a rank raised, or did not answer in time.
        """
        self._start(world)
        with tempfile.TemporaryDirectory() as folder:
            store = os.path.join(folder, "store")
            for rank in range(world):
                self._workers[rank][1].send((world, rank, store, device, function, args))
            answers, failures = self._collect(world, time.monotonic() + timeout)
        if failures:
            self.close()  # the ranks that did not fail may wait in a collective for ever
            kind = NoGroup if any(isinstance(text, _NotConnected) for text in failures.values()) else RanksFailed
            raise kind("\n".join(f"[rank {rank}] {text}" for rank, text in sorted(failures.items())))
        return [answers[rank] for rank in range(world)]

    def _collect(self, world: int, deadline: float) -> tuple[dict[int, Any], dict[int, str]]:
        answers, failures = {}, {}
        waiting = {self._workers[rank][1]: rank for rank in range(world)}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                failures.update(dict.fromkeys(waiting.values(), "no answer in time") if not failures else {})
                break
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    ok, value = connection.recv()
                except EOFError:
                    ok, value = False, "the process died"
                if ok:
                    answers[rank] = value
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + 3)
        return answers, failures


@torch.compiler.assume_constant_result
def _as_on_a_cpu(device_type: str, count: int | None) -> choices.Busy:
    """So that accelerators hop round a ring with the few tokens of a test, which they would gather."""
    return choices.OF_CPU


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    attention_backend = _AttentionBackendRegistry.get_active_backend()[0]
    while True:
        try:
            world, rank, store, device, function, args = connection.recv()
        except EOFError:
            return
        connected = False
        try:
            if world > 1:
                os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
                group = {"init_method": f"file://{store}", "rank": rank, "world_size": world}
                if device == "cpu":
                    dist.init_process_group("gloo", timeout=timedelta(seconds=60), **group)
                else:
                    torch.accelerator.set_device_index(rank)
                    backends = f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}"
                    dist.init_process_group(backends, timeout=timedelta(seconds=60), **group)
                dist.barrier()  # a rank with nothing to do would go away while another still connects, which fails
            connected = True
            with mock.patch.object(choices, "_busy", _as_on_a_cpu) if device != "cpu" else nullcontext():
                answer = (True, function(*args))
        except BaseException:
            answer = (False, (str if connected else _NotConnected)(traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            # A model's set_attention_backend sets it for the whole process in some versions of diffusers.
            _AttentionBackendRegistry.set_active_backend(attention_backend)
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
                os.environ.pop(name, None)
        connection.send(answer)


_pool = RankPool()
atexit.register(_pool.close)


def run_ranks(world: int, function: Callable, *args: Any, timeout: float = 240, device: str = "cpu") -> list[Any]:
    """`function(*args)` on `world` ranks; the function must be importable (module level)."""
    try:
        return _pool.run(world, function, *args, timeout=timeout, device=device)
    except NoGroup:  # Gloo loses a connection about once in some thousand groups
        return _pool.run(world, function, *args, timeout=timeout, device=device)
