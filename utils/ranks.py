"""How the scripts of utils/ that torchrun starts become ranks."""

import sys

import torch

import diffusers_rocm
from diffusers_rocm.distributed.launching import under_torchrun


def rank_of_torchrun(device: str | None = None) -> torch.device:
    """The process group is made; what keeps it from that is said in one line, and ends the script."""
    if not under_torchrun():
        sys.exit(f"no ranks: start it by torchrun --nproc_per_node=2 {sys.argv[0]}, or as many as there are GPUs")
    try:
        return diffusers_rocm.init(device)
    except ValueError as error:
        sys.exit(str(error))
