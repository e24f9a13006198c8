"""How far an answer is from that of one rank, and how far it may be."""

import math

import torch
from torch import Tensor

from ..distributed.axis import Axis
from ..distributed.collectives import all_gather_stacked


# The largest relative L2 distance of an output from that of one rank, of one block; that of more is below (`bar_of`).
# Two runs in bfloat16 round differently: of one block of each known model tp=2 is 0.003 to 0.016 away, of 57 blocks of
# FLUX.1's kind 0.025, of 28 of LTX-Video's 0.029. Where each rank of two attends to its own keys alone it is 0.08 to
# 0.41 in one block or few, and without the sums of tp=2 0.12 to 0.98; in 57 blocks, a ring that weighs a part by e^0.3
# too much is 0.076 away.
BARS = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
# Of an output's distance from float32, over that of one rank.
FLOAT32_BAR = 1.25
# With communication in fewer bits: of the same, or of the bar for bfloat16.
LOSSY_BAR = 1.5


def distance(output: Tensor, wanted: Tensor) -> float:
    """Relative L2, in float64: NaN where there is one in either."""
    wanted = wanted.double()
    return ((output.to(wanted.device).double() - wanted).norm() / wanted.norm()).item()


def largest_of(own: float, world: Axis) -> float:
    """The largest of all ranks' distances, NaN where one is: what is wrong on one rank is wrong. All ranks call it."""
    if world.size == 1:
        return own
    return all_gather_stacked(torch.tensor([own], dtype=torch.float64, device=world.device), world).max().item()


def bar_of(blocks: int, dtype: torch.dtype, lossy: bool) -> float:
    """The largest relative L2 distance of a forward of so many blocks from that of one rank; lossy: with 8 bits.

    What blocks add grows as a random walk does, with the root of their number; the rest is there without them.
    """
    return (LOSSY_BAR * BARS[torch.bfloat16] if lossy else BARS[dtype]) * (3 + math.sqrt(max(blocks, 1))) / 4
