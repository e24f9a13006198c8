"""Dynamic checks: the devices at work, each probe in processes that are killed when it hangs (`children`).

A driver's word that GPUs reach each other is worth little (vllm #51513): what counts is data that arrived, then a
collective, then the same without P2P as the control that tells what is broken.
"""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from . import kernel_work, work
from .cards import INSTALL_ROCM
from .children import Outcome, run_ranks
from .debug_log import DEBUG, judge_transports, known_bad, parse
from .finding import Finding, ok, problem, skipped, warning
from .machine import TorchBuild
from .settings import switched_off


P2P_OFF = "export NCCL_P2P_DISABLE=1"
# Gloo listens where the host's name leads, or on the interface that it is given.
GLOO = 'unset GLOO_SOCKET_IFNAME; ip -brief address; getent hosts "$(hostname)"'
MEMORY = "sudo dmesg | grep -iE 'mce|edac|hardware error|out of memory'"
# By what NCCL or RCCL says of a communicator that it cannot make, which is no matter of P2P.
CAUSES = (
    ("no socket interface found", "unset NCCL_SOCKET_IFNAME NCCL_SOCKET_FAMILY"),
    ("Failed to initialize any NET plugin", "unset NCCL_NET NCCL_NET_PLUGIN"),
    ("Unrecognized element token", "unset NCCL_ALGO NCCL_PROTO"),
)
# Below this no PCIe link of a card is (x4 of generation 3 carries 3.5 GB/s), and something else is wrong.
SLOW_BUS = 1.0
# How much faster one way has to be than the other before it is said.
FASTER = 1.1
_LARGE = work.megabytes(work.MODEL_BYTES)


def ask_torch(seconds: float) -> tuple[TorchBuild, str]:
    """What torch says of itself, and how it failed to, or "": a driver may hang already here."""
    outcome = run_ranks(work.ask_torch, 1, {}, seconds)
    if outcome.failure:
        return TorchBuild(torch.__version__, torch.version.hip, torch.version.cuda), outcome.failure
    found = outcome.results[0]
    return TorchBuild(**found | {name: tuple(found[name]) for name in ("architectures", "devices")}), ""


def run_probes(
    build: TorchBuild, device: str, gpus: int, seconds: float, environment: Mapping[str, str]
) -> Iterator[Finding]:
    """All of them, one after the other. `gpus` is the number of ranks, of CPU too."""
    if gpus > 1:
        yield replace(
            copies(run_ranks(work.copy_between, 1, {"device": device, "count": gpus}, seconds), device), name="copies"
        )
        yield from _collectives(build, device, gpus, seconds, environment)
    else:
        for name in ("copies", "collectives", "bandwidth", "peer to peer", "channels"):
            yield replace(skipped("one GPU"), name=name)
    yield from kernels(device, seconds)
    if device == "cpu":
        yield replace(skipped("no GPU"), name="sdpa")
    else:
        yield replace(sdpa(run_ranks(work.ask_sdpa, 1, {"device": device}, seconds)), name="sdpa")


def copies(outcome: Outcome, device: str) -> Finding:
    """Do contents arrive whole between each two devices, and how fast (GB/s)?"""
    rows, fix = outcome.results.get(0, []), MEMORY if device == "cpu" else P2P_OFF
    bad = [row for row in rows if row["wrong"]]
    if bad:
        pairs = ", ".join(f"{row['source']} to {row['target']} ({row['wrong']} elements)" for row in bad)
        return problem(f"contents arrive wrong from {pairs}", fix)
    if outcome.failure:
        return problem(outcome.failure, fix)
    speeds = [row["gigabytes"] for row in rows]
    worst = min(rows, key=lambda row: row["gigabytes"])
    return ok(
        f"{len(rows)} ordered pair(s) verified, {statistics.median(speeds):.1f} GB/s; "
        f"slowest {worst['source']} to {worst['target']}: {worst['gigabytes']:.1f}"
    )


def _collectives(
    build: TorchBuild, device: str, gpus: int, seconds: float, environment: Mapping[str, str]
) -> Iterator[Finding]:
    arguments = {"device": device, "local_ranks": list(range(gpus))}
    outcome = run_ranks(work.exchange, gpus, arguments, seconds, DEBUG)
    yield replace(collectives(outcome, gpus, device), name="collectives")
    yield replace(bandwidth(outcome, device), name="bandwidth")
    if device == "cpu":
        for name in ("peer to peer", "channels"):
            yield replace(skipped("Gloo has no P2P and no channels"), name=name)
        return
    if "NCCL_P2P_DISABLE" in switched_off(environment):
        yield replace(skipped("NCCL_P2P_DISABLE is set: P2P was not tried"), name="peer to peer")
    else:
        control = run_ranks(work.exchange, gpus, arguments, seconds, DEBUG | {"NCCL_P2P_DISABLE": "1"})
        yield replace(peer_to_peer(outcome, control), name="peer to peer")
    if outcome.failure:
        yield replace(skipped("no collective worked"), name="channels")
        return
    log, peers = parse(outcome.log), all(len(each["peers"]) + 1 >= gpus for each in build.devices[:gpus])
    found = judge_transports(log.channels, dict.fromkeys(range(gpus), 0), rdma=False, peers=peers)
    yield replace(found, name="channels", seen=f"{log.library or 'unknown library'}: {found.seen}")
    for text in log.warnings[:5]:
        yield replace(warning(f"it warns: {text[:200]}", "NCCL_DEBUG=WARN diffusers-rocm doctor"), name="channels")


def wrong(outcome: Outcome) -> list[str]:
    """Collectives with wrong contents, by rank."""
    return [
        f"{what} on rank {rank} ({count} elements)"
        for rank, found in sorted(outcome.results.items())
        for what, count in found["wrong"].items()
        if count
    ]


def collectives(outcome: Outcome, world: int, device: str) -> Finding:
    """Do all collectives end, with the right contents on every rank?"""
    library = parse(outcome.log).library
    if bad := wrong(outcome):
        return problem(f"wrong contents: {', '.join(bad[:4])}", MEMORY if device == "cpu" else P2P_OFF)
    if outcome.failure:
        if why := known_bad(library):
            return problem(f"{outcome.failure}; {library} is known for it: {why}", INSTALL_ROCM)
        if device == "cpu":
            return problem(outcome.failure, GLOO)
        said = f"{outcome.failure}\n{outcome.log}"
        known = next((fix for words, fix in CAUSES if words in said), P2P_OFF)
        return problem(outcome.failure, f"{known}  # then: diffusers-rocm doctor --gpus {world}")
    if why := known_bad(library):
        return warning(f"worked here, but {library}: {why}", INSTALL_ROCM)
    names = dict.fromkeys(what.partition(" of ")[0] for what in outcome.results[0]["wrong"])
    sizes = " and ".join(map(work.megabytes, (work.SMALL_BYTES, work.MODEL_BYTES)))
    return ok(f"{', '.join(names)} of {sizes}: verified on {world} ranks")


def _speeds(outcome: Outcome) -> dict[str, float]:
    """Bus GB/s by collective, of the slowest rank; empty where a rank has none."""
    if outcome.failure or not outcome.results:
        return {}
    every = [found["gigabytes"] for found in outcome.results.values()]
    return {what: min(each[what] for each in every) for what in every[0]}


def bandwidth(outcome: Outcome, device: str) -> Finding:
    """Bus GB/s of each collective and size, of the slowest rank."""
    speeds = _speeds(outcome)
    if not speeds:
        return skipped("no collective worked")
    by_size: dict[str, list[str]] = {}
    for what, speed in speeds.items():
        name, _, size = what.partition(" of ")
        by_size.setdefault(size, []).append(f"{name} {speed:.2f}")
    seen = "bus GB/s of " + "; ".join(f"{size}: {', '.join(each)}" for size, each in by_size.items())
    if device != "cpu" and min(speed for what, speed in speeds.items() if _LARGE in what) < SLOW_BUS:
        return warning(
            f"{seen}: slower than any link of a card", "sudo lspci -vv | grep -E 'LnkCap:|LnkSta:'; nproc; uptime"
        )
    return ok(seen)


def peer_to_peer(outcome: Outcome, control: Outcome) -> Finding:
    """What the same collectives with NCCL_P2P_DISABLE=1, the control, say of those without."""
    broken, control_broken = outcome.failure or wrong(outcome), control.failure or wrong(control)
    if broken and not control_broken:
        return problem("collectives fail with P2P and work without it: P2P is broken here", P2P_OFF)
    if broken:
        if why := known_bad(parse(outcome.log).library or parse(control.log).library):
            return problem(f"collectives fail with and without P2P: {why}", INSTALL_ROCM)
        return problem(
            "collectives fail with and without P2P: it is not P2P, but the library, shared memory or a GPU",
            "df -h /dev/shm; NCCL_DEBUG=INFO NCCL_P2P_DISABLE=1 diffusers-rocm doctor --gpus 2",
        )
    if control_broken:
        said = control.failure or "wrong contents"
        return warning(
            f"collectives work with P2P and fail without it, through shared memory: {said}",
            "df -h /dev/shm; docker run --shm-size=8g ...",
        )
    speeds, others = _speeds(outcome), _speeds(control)
    what = next(name for name in speeds if _LARGE in name)
    seen = f"{what}: {speeds[what]:.2f} GB/s, {others[what]:.2f} with NCCL_P2P_DISABLE=1"
    if others[what] > FASTER * speeds[what]:
        return warning(f"{seen}: faster through the host's memory", P2P_OFF)
    if not any(each.transport == "P2P" for each in parse(outcome.log).channels):
        return ok(f"not in use; {seen}")
    return ok(seen)


def kernels(device: str, seconds: float) -> Iterator[Finding]:
    """A finding by kernel. One that brings its process down does not hide those after it."""
    tried: list[str] = []
    while True:
        outcome = run_ranks(kernel_work.try_kernels, 1, {"device": device, "skip": tried}, seconds)
        results = outcome.results.get(0, {})
        for name, result in results.items():
            yield replace(kernel(name, result), name=f"attention {name}")
        tried += results
        if not outcome.failure:
            return
        rest = [name for name in kernel_work.KERNELS if name not in tried]
        if f"at kernel {rest[0] if rest else ''}" not in outcome.failure or not rest:
            yield replace(problem(outcome.failure, "diffusers-rocm env"), name="attention kernels")
            return
        yield replace(problem(outcome.failure, _without(rest[0])), name=f"attention {rest[0]}")
        tried.append(rest[0])


def _without(kernel: str) -> str:
    package = {"aiter": "aiter", "flash_attn": "flash-attn", "flash_attn_3": "flash-attn-3"}.get(kernel)
    if package is not None:
        return f"pip uninstall -y {package}"
    return "export DIFFUSERS_ATTN_BACKEND=_native_math  # and tell us, with what diffusers-rocm env prints"


def kernel(name: str, result: Mapping[str, Any]) -> Finding:
    """Is what an attention kernel answers within its limits of the definition?"""
    if "why_not" in result:
        return skipped(result["why_not"])
    errors, wrong, shapes = [], [], []
    for row in result["tried"]:
        what = f"{row['dtype']}{' masked' if row['mask'] else ''}"
        if "error" in row:
            wrong.append(f"{what}: {row['error']}")
            continue
        shapes.append(f"lse {row['shape']}" if "shape" in row else "no lse")
        errors.append(f"{what} {row['out']:.0e}" + (f" and {row['lse']:.0e}" if "lse" in row else ""))
        # Not <=: an error that is no number is none that is small.
        if not row["out"] <= row["out_limit"] or not row.get("lse", 0) <= row.get("lse_limit", 0):
            wrong.append(f"{what} is wrong (limits {row['out_limit']:g} and {row.get('lse_limit', 0):g})")
    text = "; ".join([*wrong, *dict.fromkeys(shapes), *(["off by " + ", ".join(errors)] if errors else [])])
    return problem(text, _without(name)) if wrong else ok(text)


def sdpa(outcome: Outcome) -> Finding:
    """torch's own choice, which models take that are not split."""
    if outcome.failure:
        return problem(outcome.failure, "diffusers-rocm env")
    answers = outcome.results[0]
    usable = [name for name, reason in answers.items() if not reason]
    text = "; ".join(f"not {name}: {reason[:200]}" for name, reason in answers.items() if reason)
    if any("TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL" in reason for reason in answers.values()):
        return warning(text, "export TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1")
    if not usable:
        return warning(f"math alone; {text}", "diffusers-rocm env")
    return ok(f"takes {' and '.join(usable)}{'; ' + text if text else ''}")
