"""Under torchrun: are the nodes alike, and what carries their collectives?

Each rank talks to the others over Gloo, and has a collective tried by a process of its own (`children`), which is
killed when it hangs. Whatever a rank finds is exchanged before it is judged: all ranks come to the same findings.
"""

import json
import os
import shlex
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ..distributed import name_ranks
from ..distributed.axis import Axis
from ..distributed.collectives import all_gather_int64, all_gather_text
from . import work
from .children import Outcome, run_ranks
from .debug_log import DEBUG, judge_transports, parse, telling_lines
from .finding import OK, SKIPPED, Finding, ok, problem, skipped, warning
from .privacy import is_whole
from .probes import bandwidth, collectives


CLOCK_ROUNDS, CLOCK_LIMIT = 5, 0.5
OF_ONE_NODE = "of one node: run `diffusers-rocm doctor` on it, without torchrun"
# They name a node's own devices, or a rank's own place.
OF_A_NODE = (
    "RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL",
    "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_DEBUG_FILE",
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """What a rank tells the others of itself and its node, as JSON.

    Attributes:
        node: its number; local_rank: the rank's own there.
        device: of the collectives.
        rdma: whether there are RDMA devices.
        static: findings, as `as_json` has them.
        versions: of packages.
        settings: environment variables.
    """

    node: int
    local_rank: int
    device: str
    rdma: bool
    static: list[dict[str, Any]]
    versions: dict[str, str]
    settings: dict[str, str]


def across_nodes(mine: Place, seconds: float, probe: bool, clean: Callable[[str], str]) -> Iterator[Finding]:
    """Findings of all nodes, the same on every rank; every rank calls it, in a Gloo group.

    Args:
        seconds: that collectives have.
        probe: whether they are tried.
        clean: takes names of users and machines out of what leaves this one.
    """
    world = Axis.of_all()
    # Texts are cleaned, and not what holds them: a user may be called as any word of it is.
    static = [row | {"seen": clean(row["seen"])} for row in mine.static]
    mine = replace(mine, static=static, settings={name: clean(value) for name, value in mine.settings.items()})
    everyone = [Place(**json.loads(text)) for text in all_gather_text(json.dumps(asdict(mine)), world)]
    yield from of_nodes(everyone)
    yield replace(clock(_clocks(world)), name="clocks")
    yield replace(alike("versions", [each.versions for each in everyone]), name="versions")
    yield replace(alike("settings", [each.settings for each in everyone]), name="settings")
    if not probe:
        return
    device = everyone[0].device  # one that is judged alike by all, should a rank have been given another
    outcome = _exchange(world, device, [each.local_rank for each in everyone], seconds, clean)
    yield replace(collectives(outcome, world.size, device), name="collectives")
    yield replace(bandwidth(outcome, device), name="bandwidth")
    nodes = {rank: each.node for rank, each in enumerate(everyone)}
    yield replace(channels(outcome, device, nodes, any(each.rdma for each in everyone)), name="channels")
    for name in ("copies", "peer to peer", "attention kernels", "sdpa"):
        yield replace(skipped(OF_ONE_NODE), name=name)


def of_nodes(everyone: list[Place]) -> Iterator[Finding]:
    """The first node's static findings, and of the other nodes what is not fine there."""
    seen: set[int] = set()
    for each in everyone:
        if each.node in seen:
            continue
        for finding in (Finding(**row) for row in each.static):
            if not seen or finding.status not in (OK, SKIPPED):
                yield replace(
                    finding, seen=f"node {each.node}: {finding.seen}" if finding.status != SKIPPED else finding.seen
                )
        seen.add(each.node)


def _clocks(world: Axis) -> list[list[int]]:
    """Nanoseconds [round][rank]: all ranks leave a round together, but for the network's time."""
    rounds = []
    for _ in range(CLOCK_ROUNDS + 1):
        rounds.append(all_gather_int64(torch.tensor([time.time_ns()]), world).flatten().tolist())
    return rounds[1:]  # to the first one they came when they came


def clock(rounds: list[list[int]]) -> Finding:
    """Clocks that differ make logs of several nodes hard to read, and break certificates and shared file systems."""
    offsets = [statistics.median(times[rank] - times[0] for times in rounds) / 1e9 for rank in range(len(rounds[0]))]
    rank = max(range(len(offsets)), key=lambda rank: abs(offsets[rank]))
    seen = f"rank {rank} is {offsets[rank]:+.3f} s off rank 0"
    if abs(offsets[rank]) > CLOCK_LIMIT:
        return warning(seen, "sudo timedatectl set-ntp true; sudo chronyc makestep")
    return ok(f"at most {max(map(abs, offsets)):.3f} s apart")


def alike(what: str, by_rank: list[Mapping[str, str]]) -> Finding:
    """Ranks that choose algorithms by other settings, or speak other versions, hang in their first collective."""
    names = sorted({name for each in by_rank for name in each} - {*OF_A_NODE})
    different, fixes, private, grave = [], [], [], False
    for name in names:
        groups: dict[str, list[int]] = {}
        for rank, each in enumerate(by_rank):
            groups.setdefault(each.get(name, "not there"), []).append(rank)
        if len(groups) > 1:
            different.append(f"{name}: " + ", ".join(f"{value} on {name_ranks(on)}" for value, on in groups.items()))
            grave = grave or what == "versions" or name.startswith(("NCCL_", "RCCL_"))
            first = by_rank[0].get(name)
            if what == "versions":
                fixes.append("pip install " + shlex.quote(f"{name}=={first}" if first else name))
            elif first is None:
                fixes.append(f"unset {name}")
            elif is_whole(first):
                fixes.append(f"export {name}={shlex.quote(first)}")
            else:
                private.append(name)
    if not different:
        return ok(f"{len(names)} are the same on {len(by_rank)} rank(s)")
    fix = "; ".join([*fixes, *(f'echo "${name}"' for name in private)]) + "  # on every node"
    if private:
        fix += f", where {', '.join(private)} should be what rank 0 has"
    return (problem if grave else warning)("; ".join(different), fix)


def _exchange(
    world: Axis, device: str, local_ranks: list[int], seconds: float, clean: Callable[[str], str]
) -> Outcome:
    """The collectives that every rank's child has tried, all ranks' results and log lines together."""
    with socket.socket() as listener:  # free now; the first rank's child takes it in a moment
        listener.bind(("", 0))
        port = listener.getsockname()[1]
    meet = all_gather_text(f"tcp://{os.environ['MASTER_ADDR']}:{port}", world)[0]
    arguments = {"device": device, "local_ranks": local_ranks}
    mine = run_ranks(work.exchange, world.size, arguments, seconds, DEBUG, ranks=[world.rank], meet=meet)
    told = {
        "result": mine.results.get(world.rank),
        "failure": clean(mine.failure),
        "log": telling_lines(mine.log, clean),
    }
    everyone = [json.loads(text) for text in all_gather_text(json.dumps(told), world)]
    # Who lost a rank fails, and who waits for one hangs: neither is the cause where there is another.
    failures = [each["failure"] for each in everyone if each["failure"]]
    failures.sort(key=lambda text: (" hung" in text, " failed" in text))
    results = {rank: each["result"] for rank, each in enumerate(everyone) if each["result"] is not None}
    return Outcome(results, "; ".join(failures), "\n".join(each["log"] for each in everyone))


def channels(outcome: Outcome, device: str, nodes: Mapping[int, int], rdma: bool) -> Finding:
    """What carries the collectives between nodes, and inside them."""
    if device == "cpu":
        return skipped("Gloo has no P2P and no channels")
    if outcome.failure:
        return skipped("no collective worked")
    return judge_transports(parse(outcome.log).channels, nodes, rdma, peers=False)
