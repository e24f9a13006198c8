"""What the scripts of utils/ note of a run beside its figures."""

import os
import platform

import diffusers
import torch
import torch.distributed as dist

from diffusers_rocm.commands import env


def versions() -> dict[str, str]:
    """Of what was run, by how many ranks, on which GPUs."""
    found = {"torch": torch.__version__, "diffusers": diffusers.__version__, "python": platform.python_version()}
    collected = env.collect()
    found |= {name: collected[name] for name in ("date", "sources")}
    if torch.cuda.is_available():
        found["device"] = f"{dist.get_world_size()} x {torch.cuda.get_device_name()}"
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    found["NCCL_P2P_DISABLE"] = os.environ.get("NCCL_P2P_DISABLE", "0")
    return found
