"""What there is room for in the memory of the ranks' hosts."""

import os

import psutil
import torch

from ..distributed.axis import Axis
from ..distributed.collectives import all_gather_int64


# Of the memory that there is, weights may take this much: the rest is for what is computed, and for others.
ROOM = 0.8


def host_room(mine: int, world: Axis) -> tuple[int, float]:
    """Bytes that the ranks of a host take together, of `mine` at most each, and for how many the host with the least
    memory has room. The same on all ranks, who all ask.
    """
    by_rank = all_gather_int64(torch.tensor([mine, -psutil.virtual_memory().available]), world)
    most, available = by_rank.amax(0).abs().tolist()
    return most * int(os.environ.get("LOCAL_WORLD_SIZE", world.size)), ROOM * available
