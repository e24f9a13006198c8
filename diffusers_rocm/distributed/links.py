"""What the ranks of an axis have in common: how fast they reach each other, and how large the smallest GPU is.

Both decide how messages are cut, so all ranks must know the same of them.
"""

import functools
import logging
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from .axis import Axis
from .choices import computes_beside, goes_by_gather, is_known, multiprocessors
from .collectives import all_gather_int64, all_gather_text, on_all_ranks
from .host_memory import HostMemory, share, tried
from .peer_memory import can_fetch


logger = logging.getLogger(__name__)

# Bytes a second that a GPU sends to the others of its axis: NVLink and xGMI are above, PCIe and networks below.
FAST = 100e9

# Of the process group's rate, what copies may lack: they go beside what is computed, and take nothing from it.
SLOWER = 0.8

# A message as large as those of a long sequence, some in a row, for the best of some tries: ranks that are late, and
# groups that are still connecting, are no slow links.
_BYTES, _IN_A_ROW, _TRIES = 64 << 20, 4, 5


def links_are_slow(axis: Axis) -> bool:
    """Whether the links of an axis are the slower part, by an all-to-all; the slowest rank's word counts for all.

    A message beside a kernel takes multiprocessors from it. Over fast links that costs more than it hides
    (docs/performance.md).
    """
    if axis.size == 1:
        return False
    slowest = all_gather_int64(torch.tensor([_rate(axis)]), axis).min().item()
    rate = f"{slowest / 1e9:.0f} GB/s from each" if slowest else "what the host can"
    known = replace(axis, slow_links=slowest < FAST)
    beside = computes_beside(known) and axis.name != "tp"  # whose sums are waited for
    so = "they go beside what is computed" if beside else "they go by themselves"
    if axis.name == "ulysses" and goes_by_gather(known):
        so += ", by a gather"
    logger.info(f"messages of {axis.size} ranks ({axis.name}) move {rate}: {so}")
    return known.slow_links


def _rate(axis: Axis) -> int:
    """Bytes a second that this rank sends to the others; 0 over Gloo, where it is the host that sends."""
    if axis.device.type == "cpu":
        return 0
    sent, received = torch.zeros(2, _BYTES // axis.size * axis.size, dtype=torch.uint8, device=axis.device)
    return _timed(lambda: dist.all_to_all_single(received, sent, group=axis.group), axis)


def _timed(exchange: Callable[[], object], axis: Axis) -> int:
    """Bytes a second that this rank sends to the others, by an `exchange` of `_BYTES`, a part for each rank."""
    module, best = torch.get_device_module(axis.device), float("inf")
    for _ in range(_TRIES):
        begin, end = (module.Event(enable_timing=True) for _ in range(2))
        exchange()  # ranks meet, and the host is ahead
        begin.record()
        for _ in range(_IN_A_ROW):
            exchange()
        end.record()
        module.synchronize(axis.device)
        best = min(best, begin.elapsed_time(end) / 1e3)
    return int(_BYTES // axis.size * (axis.size - 1) * _IN_A_ROW / best)


def reaches_memory(axis: Axis) -> bool:
    """Whether each rank of an axis reaches the memory of the others: NVIDIA GPUs of one host, none tried elsewhere."""
    if not _may_copy(axis):
        return False
    devices = all_gather_int64(torch.tensor([axis.device.index]), axis).flatten().tolist()
    others = set(devices) - {axis.device.index}
    on_one_host = _on_one_host(axis)
    own = on_one_host and len(others) == axis.size - 1
    own = own and all(torch.cuda.can_device_access_peer(axis.device, other) for other in others)
    on_all = functools.partial(on_all_ranks, axis=axis)
    reached = on_all(own) and can_fetch(axis.group, axis.device, on_all)
    how = "by copies out of each other's memory" if reached else "by the process group"
    one_each = on_one_host and len(set(devices)) < axis.size
    why = ": ranks see one GPU each, as by CUDA_VISIBLE_DEVICES; let all see all" if one_each else ""
    logger.info(f"messages of {axis.size} ranks ({axis.name}) go {how} where a step is a graph{why}")
    return reached


def reaches_host(axis: Axis) -> bool:
    """Have messages of an axis go through the host's memory where a step is a graph, and whether they do; all call it.

    NVIDIA GPUs of one host, none tried elsewhere.
    """
    if not _may_copy(axis):
        return False
    on_all, of_all = (functools.partial(each, axis=axis) for each in (on_all_ranks, all_gather_text))
    is_fast = functools.partial(_is_fast, axis)
    reached = _on_one_host(axis) and share(axis.group, axis.device, on_all, of_all, is_fast)
    how = "by copies through the host's memory" if reached else "by the process group"
    logger.info(f"messages of {axis.size} ranks ({axis.name}) go {how} where a step is a graph")
    return reached


def _is_fast(axis: Axis, memory: HostMemory) -> bool:
    """Whether copies through the host's memory are about as fast as the process group's messages."""

    def prepare() -> tuple[Callable[[], object], ...]:
        sent, received = torch.zeros(2, axis.size, _BYTES // axis.size, dtype=torch.uint8, device=axis.device)
        replay = memory.captured(sent.unbind(), received.unbind())
        return lambda: dist.all_to_all_single(received, sent, group=axis.group), replay

    ways = tried(prepare)
    if not on_all_ranks(ways is not None, axis):
        return False
    rates = all_gather_int64(torch.tensor([_timed(exchange, axis) for exchange in ways]), axis).amin(0) / 1e9
    logger.info(f"messages of {axis.size} ranks ({axis.name}) move {rates[1]:.0f} GB/s through the host's memory")
    return bool(rates[1] >= SLOWER * rates[0])


def _may_copy(axis: Axis) -> bool:
    return axis.size > 1 and axis.device.type == "cuda" and not torch.version.hip


def _on_one_host(axis: Axis) -> bool:
    """Whether all ranks of an axis are, who all ask."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    hosts = all_gather_text(f"{socket.gethostname()} {boot.read_text() if boot.exists() else ''}", axis)
    return len(set(hosts)) == 1


def gpus_of(axis: Axis) -> tuple[int | None, bool]:
    """Of an axis, where cards may differ: the fewest multiprocessors, None for CPUs; whether all kinds are known."""
    own = [multiprocessors(axis.device) or 0, is_known(axis.device)]
    fewest, known = all_gather_int64(torch.tensor(own), axis).amin(0).tolist()
    if fewest:
        logger.info(f"what is worth a message of its own is that for a GPU of {fewest} multiprocessors")
    if not known:
        logger.info("not all GPUs are of a kind that was measured: nothing is held, or copied untimed, for messages")
    return fewest or None, bool(known)
