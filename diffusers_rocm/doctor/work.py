"""What the ranks of a probe do. torch alone is imported: a rank is there in a second or two, and what fails is not us.

Sizes are those that models send: 28.3 MB is an activation of FLUX.1 at 1024x1024 (4608 tokens of 3072 in bfloat16),
1 MiB is what latency makes of a small one.
"""

import os
import statistics
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention


MODEL_BYTES, SMALL_BYTES = 4608 * 3072 * 2, 1 << 20
IN_A_ROW, REPEATS = 5, 3

# torch 2.13 renamed it
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def ask_torch(rank) -> dict[str, Any]:
    """The build, and the devices that it can open: `machine.TorchBuild`'s fields."""
    count = torch.cuda.device_count()
    devices = []
    for index in range(count):
        rank.stage(f"opening device {index}")
        of = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "name": of.name,
                "architecture": of.gcnArchName.split(":")[0] if torch.version.hip else f"sm_{of.major}{of.minor}",
                "memory": of.total_memory,
                "peers": [i for i in range(count) if i != index and torch.cuda.can_device_access_peer(index, i)],
            }
        )
    return {
        "version": torch.__version__,
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
        "architectures": torch.cuda.get_arch_list(),
        "devices": devices,
        "folder": os.path.join(os.path.dirname(torch.__file__), "lib"),
    }


def pattern(count: int, seed: int, device: torch.device) -> Tensor:
    """int32 [count] that differs everywhere from that of another seed, and from itself shifted."""
    return torch.arange(count, dtype=torch.int32, device=device) * 1664525 + (seed * 1013904223 & 0x7FFFFFFF)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def wrong_elements(
    source: torch.device, target: torch.device, count: int, seed: int, copy: Callable[..., Any] = Tensor.copy_
) -> int:
    """Copy from one device to the other, and compare on the other with what should be there."""
    received = torch.full((count,), -1, dtype=torch.int32, device=target)
    sent = pattern(count, seed, source)
    copy(received, sent)
    _wait(target)
    return int((received != pattern(count, seed, target)).sum())


def copy_between(rank, device: str, count: int) -> list[dict[str, Any]]:
    """Each ordered pair of devices: elements that came wrong, and GB/s. On the CPU, within the host's memory."""
    devices = [torch.device(device, index if device != "cpu" else 0) for index in range(count)]
    found = []
    for i, source in enumerate(devices):
        for j, target in enumerate(devices):
            if i == j:
                continue
            rank.stage(f"copying from device {i} to {j}")
            # Sizes that are no multiples of a page; two contents, so that what lay there is not taken for a copy.
            sizes = [(SMALL_BYTES // 4 + 1, 1), (MODEL_BYTES // 4 + 3, 2), (MODEL_BYTES // 4 + 3, 3)]
            wrong = sum(wrong_elements(source, target, size, seed + 8 * i) for size, seed in sizes)
            sent = torch.zeros(MODEL_BYTES, dtype=torch.uint8, device=source)
            received = torch.zeros(MODEL_BYTES, dtype=torch.uint8, device=target)
            seconds = _seconds(lambda to=received, of=sent: to.copy_(of), (source, target))
            found.append({"source": i, "target": j, "wrong": wrong, "gigabytes": MODEL_BYTES / seconds / 1e9})
            rank.found(found)
    return found


def _seconds(call: Callable[[], Any], devices: tuple[torch.device, ...]) -> float:
    """Of one call, out of some in a row."""
    call()
    times = []
    for _ in range(REPEATS):
        for device in devices:
            _wait(device)
        begin = time.perf_counter()
        for _ in range(IN_A_ROW):
            call()
        for device in devices:
            _wait(device)
        times.append((time.perf_counter() - begin) / IN_A_ROW)
    return statistics.median(times)


def join(rank, device: str, local_rank: int) -> torch.device:
    """Meet the other ranks over NCCL, RCCL or Gloo."""
    own = torch.device("cpu") if device == "cpu" else torch.device(device, local_rank)
    if device != "cpu":
        torch.get_device_module(device).set_device(own)
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        init_method=rank.meet,
        rank=rank.rank,
        world_size=rank.world,
        timeout=timedelta(seconds=rank.seconds),
    )
    return own


def exchange(rank, device: str, local_ranks: list[int]) -> dict[str, Any]:
    """The collectives of a model's step, verified, then timed.

    Returns:
        `wrong`: elements by collective and size; `gigabytes`: bus bandwidth in GB/s (what a link carries, as
        nccl-tests counts it), by collective and size.
    """
    rank.stage("meeting the other ranks")
    own = join(rank, device, local_ranks[rank.rank])
    found: dict[str, Any] = {"wrong": {}, "gigabytes": {}}
    for size in (SMALL_BYTES, MODEL_BYTES):
        for name, sends, received, wanted, share in _collectives(rank.rank, rank.world, size // 4, own):
            what = f"{name} of {megabytes(size)}"
            rank.stage(what)
            sends()
            _wait(own)
            found["wrong"][what] = int((received != wanted).sum())
            found["gigabytes"][what] = share * received.nbytes / _seconds(sends, (own,)) / 1e9
            rank.found(found)
    # The slowest rank's last collective is over before any process ends.
    rank.stage("the last barrier")
    dist.all_reduce(torch.zeros(1, device=own))
    _wait(own)
    return found


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def _collectives(
    rank: int, world: int, count: int, device: torch.device
) -> list[tuple[str, Callable[[], Any], Tensor, Tensor, float]]:
    """Name, call, where it puts what, what that should be, and the part of its bytes that a link carries.

    Contents are small integers in float32: sums are exact, in any order. Only the first call gives what it should:
    the next all-reduce sums the sum.
    """
    part = count // world
    count = part * world
    base = torch.arange(count, device=device).remainder(251).float()
    parts = base.view(world, part)
    gathered, exchanged = (torch.empty(count, device=device) for _ in range(2))
    sent = (parts + rank).flatten()
    summed = sent.clone()
    ranks = torch.arange(world, device=device)[:, None]
    return [
        (
            "all-reduce",
            lambda: dist.all_reduce(summed),
            summed,
            world * base + world * (world - 1) / 2,
            2 * (world - 1) / world,
        ),
        (
            "all-gather",
            lambda: _all_gather(gathered, sent[rank * part : (rank + 1) * part]),
            gathered,
            (parts + ranks).flatten(),
            (world - 1) / world,
        ),
        (
            "all-to-all",
            lambda: dist.all_to_all_single(exchanged, sent),
            exchanged,
            (parts[rank] + ranks).flatten(),
            (world - 1) / world,
        ),
    ]


def ask_sdpa(rank, device: str) -> dict[str, str]:
    """Would torch's own SDPA take its fused kernels for bfloat16 heads of 64? "", or its reason not to."""
    rank.stage("asking SDPA")
    q = torch.zeros(1, 4, 128, 64, dtype=torch.bfloat16, device=device)
    answers = {}
    for name, can_use in (("flash", can_use_flash_attention), ("efficient", can_use_efficient_attention)):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            usable = can_use(SDPAParams(q, q, q, None, 0.0, False, False), True)
        answers[name] = "" if usable else "; ".join(str(each.message).split(" (Triggered")[0] for each in said) or "no"
    return answers
