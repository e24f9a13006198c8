"""How fast each rank is, compared when a run ends.

Ranks that share a picture wait for each other in every layer, so that their steps take alike whichever is slow: only
the steps of replicas tell one from another. What a rank computes by itself is therefore measured apart, by a matrix
product that is the same on all.
"""

import logging
import statistics
import time
from collections.abc import Sequence

import torch

from ..distributed.axis import Axis
from ..distributed.collectives import all_gather_int64


logger = logging.getLogger(__name__)

# A rank that takes so many times as long as the median of all is a straggler.
STRAGGLER = 1.2


def time_product(device: torch.device) -> float:
    """Seconds of a matrix product: the median of 20, of a millisecond or so each."""
    size, dtype = (384, torch.float32) if device.type == "cpu" else (4096, torch.bfloat16)
    x, seconds = torch.ones(size, size, device=device, dtype=dtype), []
    for _ in range(23):
        start = time.perf_counter()
        x @ x
        if device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[3:])


def stragglers(seconds: Sequence[float]) -> dict[int, float]:
    """rank -> how many times the median of all it takes, of those that take too long.

    Of an even number it is the lower median: of two ranks, the faster one.
    """
    median = statistics.median_low(seconds)
    return {rank: each / median for rank, each in enumerate(seconds) if median > 0 and each > STRAGGLER * median}


def compare_paces(steps: Sequence[float], device: torch.device, world: Axis) -> None:
    """Log each rank's pace, and warn of stragglers; every rank calls it, rank 0 speaks. One small exchange.

    Args:
        steps: seconds of this rank's steps.
    """
    mine = [statistics.median(steps), max(steps)] if steps else [0.0, 0.0]
    row = torch.tensor([round(each * 1e9) for each in (*mine, time_product(device))])
    median, slowest, product = (all_gather_int64(row, world).T / 1e6).tolist()
    if world.rank:
        return
    for rank, (step, worst, own) in enumerate(zip(median, slowest, product, strict=True)):
        logger.info("rank %d: %.2f ms a step (slowest %.2f), %.3f ms a matrix product", rank, step, worst, own)
    compared = [("a step", median)]
    if device.type != "cpu":  # whose cores all ranks share
        compared.append(("the same matrix product", product))
    for what, values in compared:
        for rank, times in stragglers(values).items():
            shown = f"{values[rank]:.2f} and {statistics.median_low(values):.2f} ms"
            logger.warning("rank %d is a straggler: %s takes %.2f times the median (%s)", rank, what, times, shown)
