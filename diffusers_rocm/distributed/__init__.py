"""Process groups, collectives and the arithmetic of shards."""

import os
from collections.abc import Collection
from datetime import timedelta

import torch
import torch.distributed as dist


def name_ranks(ranks: Collection[int]) -> str:
    """`rank 1`, or `ranks 1, 2`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def is_first_rank() -> bool:
    """Is this the rank that speaks and writes for all: global rank 0, or the only one?"""
    return not dist.is_initialized() or dist.get_rank() == 0


def default_device_type() -> str:
    """The device type that collectives of the default process group want: `"cpu"` under Gloo alone."""
    gloo_only = dist.is_initialized() and dist.get_backend() == "gloo"
    if gloo_only or not torch.accelerator.is_available():
        return "cpu"
    return torch.accelerator.current_accelerator().type


def init(device: str | None = None, timeout: timedelta = timedelta(minutes=10)) -> torch.device:
    """Join the process group that torchrun's environment describes, and take this rank's device.

    Idempotent; outside torchrun it starts no process group and only answers the device.

    Args:
        device: `"cpu"` or an accelerator's type; by default the accelerator if there is one, else the CPU (Gloo).
        timeout: after which a collective that not all ranks have joined fails.

    Raises:
        ValueError: more ranks on this node than devices.
    """
    kind = device or default_device_type()
    if kind == "cpu":
        if not dist.is_initialized() and "RANK" in os.environ:
            dist.init_process_group("gloo", timeout=timeout)
        return torch.device("cpu")

    local_rank, count = int(os.environ.get("LOCAL_RANK", 0)), torch.get_device_module(kind).device_count()
    if local_rank >= count:
        raise ValueError(
            f"local rank {local_rank} has no device of its own: {count} {kind} device(s) are visible on this node; "
            f"start at most {count} rank(s) per node"
        )
    rank_device = torch.device(kind, local_rank)
    torch.get_device_module(kind).set_device(rank_device)
    if not dist.is_initialized() and "RANK" in os.environ:
        backend = f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
        dist.init_process_group(backend, timeout=timeout, device_id=rank_device)
    return rank_device
