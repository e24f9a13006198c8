"""Nodes that run one command together: their launchers meet, and watch each other."""

import json
import logging
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import psutil
import torch
from torch.distributed import TCPStore

from .. import __version__
from .root_cause import Cause


logger = logging.getLogger(__name__)

# Seconds between two signs of life; without one after which a node is to blame for what failed here, or is given up
# where nothing has failed; and for the others' last word.
BEAT, SILENT, LOST, PATIENCE = 0.5, 3.0, 30.0, 8.0
# Seconds of waiting for node 0 before that is said.
NOTICE = 5.0


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run, as one of them sees them.

    Attributes:
        count: how many.
        rank: of this one; ranks are numbered in the order of their nodes.
        address, port: of node 0, where all meet. Port 0 is any free one, for a single node.
        timeout: seconds for which a node waits for the others to come.
    """

    count: int = 1
    rank: int = 0
    address: str = "localhost"
    port: int = 0
    timeout: float = 300.0

    @property
    def endpoint(self) -> str:
        """`host:port`, of an IPv6 address `[host]:port`."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


class NodesFailed(RuntimeError):
    """The nodes did not meet; the message says which are missing, and where they were waited for."""


class Meeting:
    """A store on node 0, where the launchers say that they are there, that they live, and why they end.

    While the ranks of this node run, another node that fails or falls silent interrupts its launcher (by SIGINT), so
    that no rank has to wait for the timeout of a collective.

    Attributes:
        cause: why the run ends, if another node is the cause.
        interface: of the network, by which this node reaches the others; None if it cannot be told.
    """

    def __init__(self, nodes: Nodes, ranks: int):
        """Wait until all nodes are here, each with as many ranks.

        Raises:
            NodesFailed: they did not come in time, or were started differently.
        """
        self.cause: str | None = None
        self._nodes, self._deadline = nodes, time.monotonic() + nodes.timeout
        self._store = self._connect()
        try:
            came = self._gather(ranks)
        except NodesFailed:
            raise
        except RuntimeError:
            raise NodesFailed(f"node 0 left {nodes.endpoint} while the nodes gathered there") from None
        self._hosts = [each["host"] for each in came]
        self.interface = _interface(_own_address(came[1]["address"] if nodes.rank == 0 else nodes.address))
        now = time.monotonic()
        self._beats, self._heard = [0] * nodes.count, [now] * nodes.count
        self._stop, self._interrupts = threading.Event(), True
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _connect(self) -> TCPStore:
        nodes, begun = self._nodes, time.monotonic()
        told = False
        while nodes.rank:  # until somebody listens: torch would fill the screen with its attempts
            try:
                socket.create_connection((nodes.address, nodes.port), timeout=5).close()
                break
            except (OSError, UnicodeError) as error:
                reason = getattr(error, "strerror", None) or error
                if time.monotonic() > self._deadline:
                    raise NodesFailed(
                        f"waited {nodes.timeout:g} s for node 0 at {nodes.endpoint}: {reason}; is the command running "
                        "there, with this --master-addr and --port? --node-timeout waits longer"
                    ) from None
                if not told and time.monotonic() > begun + NOTICE:
                    logger.warning("node 0 at %s is not there yet: %s", nodes.endpoint, reason)
                    told = True
            time.sleep(0.5)
        made: list[TCPStore | RuntimeError] = []

        def make() -> None:
            try:
                made.append(
                    TCPStore(
                        "localhost" if nodes.rank == 0 else nodes.address,
                        nodes.port,
                        is_master=nodes.rank == 0,
                        wait_for_workers=False,
                        multi_tenant=True,
                    )
                )
            except RuntimeError as error:
                made.append(error)

        # It has no timeout of its own for something else that listens there and never answers.
        maker = threading.Thread(target=make, daemon=True)
        maker.start()
        maker.join(max(5.0, self._deadline - time.monotonic()))
        if made and isinstance(made[0], TCPStore):
            return made[0]
        reason = str(made[0]).partition("\n")[0] if made else "what listens there does not answer"
        raise NodesFailed(f"no store of a launcher at {nodes.endpoint}, --master-addr and --port: {reason}")

    def _gather(self, ranks: int) -> list[dict]:
        nodes, store = self._nodes, self._store
        if store.add(f"came/{nodes.rank}", 1) > 1:
            raise NodesFailed(f"node {nodes.rank} is at {nodes.endpoint} already: each has a --node-rank of its own")
        own = {"nodes": nodes.count, "ranks a node": ranks, "diffusers_rocm": __version__, "torch": torch.__version__}
        own |= {"host": socket.gethostname(), "address": _own_address(nodes.address)}
        store.set(f"node/{nodes.rank}", json.dumps(own))
        while missing := [str(node) for node in range(nodes.count) if not store.check([f"node/{node}"])]:
            if time.monotonic() > self._deadline:
                self._give_up(
                    f"waited {nodes.timeout:g} s at {nodes.endpoint} for node {', '.join(missing)} of {nodes.count}: "
                    "is the command running there, with this --master-addr? --node-timeout waits longer"
                )
            time.sleep(0.2)
        came = [json.loads(store.get(f"node/{node}")) for node in range(nodes.count)]
        for name in ("nodes", "ranks a node", "diffusers_rocm", "torch"):
            for node, each in enumerate(came):
                if each[name] != came[0][name]:
                    self._give_up(f"{name}: {came[0][name]} on node 0, and {each[name]} on node {node}")
        return came

    def _give_up(self, message: str) -> NoReturn:
        self._leave()
        raise NodesFailed(message)

    def _name(self, node: int) -> str:
        return f"node {node} ({self._hosts[node]})"

    def _watch(self) -> None:
        store, own = self._store, self._nodes.rank
        while not self._stop.wait(BEAT):
            try:
                store.add(f"alive/{own}", 1)
                for node in range(self._nodes.count):
                    beat = store.add(f"alive/{node}", 0)
                    if beat != self._beats[node] or store.check([f"ended/{node}"]):
                        self._beats[node], self._heard[node] = beat, time.monotonic()
                if store.check(["failed"]):
                    self._end(store.get("failed").decode())
                self._end_for_silent(LOST)
            except RuntimeError:
                self._end(f"{self._name(0)} is gone, and with it the store at {self._nodes.endpoint}")
                return

    def _end_for_silent(self, seconds: float) -> None:
        now = time.monotonic()
        for node, heard in enumerate(self._heard):
            if node != self._nodes.rank and now - heard > seconds:
                self._end(f"{self._name(node)} is gone: no sign of life for {now - heard:.0f} s")

    def _end(self, cause: str) -> None:
        if self.cause is None:
            self.cause = cause
            if self._interrupts:
                os.kill(os.getpid(), signal.SIGINT)

    def settle(self, cause: Cause) -> str:
        """The ranks of this node have ended: what to say of it, and tell the others.

        Ranks that lost others are not the cause: who is, is waited for.
        """
        self._interrupts = False
        deadline = time.monotonic() + PATIENCE
        while self.cause is None and not cause.is_own and time.monotonic() < deadline:
            self._end_for_silent(SILENT)
            time.sleep(0.1)
        if self.cause is None:
            with suppress(RuntimeError):
                self._store.compare_set("failed", "", f"{self._name(self._nodes.rank)}: {cause.text}")
        return self.cause or cause.text

    def close(self) -> None:
        """Stop watching, and leave."""
        self._interrupts = False
        self._stop.set()
        self._thread.join()
        self._leave()

    def _leave(self) -> None:
        """Node 0, which has the store, is the last to leave: the others read there what it has to say."""
        with suppress(RuntimeError):
            self._store.set(f"ended/{self._nodes.rank}", "")
            nodes, deadline = range(self._nodes.count), time.monotonic() + PATIENCE
            while self._nodes.rank == 0 and time.monotonic() < deadline and any(map(self._is_here, nodes)):
                time.sleep(0.1)

    def _is_here(self, node: int) -> bool:
        return self._store.check([f"node/{node}"]) and not self._store.check([f"ended/{node}"])


def _own_address(towards: str | None) -> str | None:
    """This node's address in the eyes of another; None if it cannot be told."""
    with suppress(OSError):
        family, kind, *_, target = socket.getaddrinfo(towards, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            return probe.getsockname()[0]
    return None


def _interface(address: str | None) -> str | None:
    found = psutil.net_if_addrs().items()
    return next((name for name, has in found if any(each.address.partition("%")[0] == address for each in has)), None)
