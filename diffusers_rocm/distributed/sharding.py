"""The arithmetic of shards: which elements of a tensor a rank keeps.

Every rank derives every other rank's sizes from the global shape, so no collective is spent asking for them, and
nothing has to be divisible: 24 heads on 5 ranks are 5, 5, 5, 5 and 4.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Block:
    """A run of `size` elements along a dim that is dealt to the ranks in whole `unit`s (a head, say)."""

    size: int
    unit: int

    def __post_init__(self):
        assert self.size % self.unit == 0, (self.size, self.unit)

    def bounds(self, rank: int, world: int) -> tuple[int, int]:
        """`(start, stop)` of the part that `rank` of `world` keeps; if uneven, the first ranks take one unit more."""
        units = self.size // self.unit
        count, extra = units // world, units % world  # divmod is not traced with symbolic sizes
        start = rank * count + min(rank, extra)
        stop = start + count + (rank < extra)
        return start * self.unit, stop * self.unit


def granule(size: int, world: int) -> int:
    """The unit for a dim that may be cut anywhere: 64 where that fits, else the largest power of two that does.

    64 keeps matrix tiles whole. It fits where it divides `size` and every rank gets at least four, so that no rank has
    over 5/4 of another's share.
    """
    unit = 64
    while unit > 1 and (size % unit or size < 4 * unit * world):
        unit //= 2
    return unit


@dataclass(frozen=True)
class Shard:
    """How one parameter is laid out over an axis.

    `dim` is the dim that is cut and `blocks` are the runs along it, each cut separately: a fused projection
    `[q | k | v]` has three, and cutting it as one would give the first ranks nothing but q. With `dim=None` the first
    rank keeps the parameter whole and the others have none (the bias of a row-parallel Linear).
    """

    dim: int | None
    blocks: tuple[Block, ...] = ()

    def size(self, rank: int, world: int) -> int:
        """How many elements along `dim` the rank keeps."""
        return sum(stop - start for start, stop in (block.bounds(rank, world) for block in self.blocks))

    def sizes(self, world: int) -> tuple[int, ...]:
        """`size` of every rank."""
        return tuple(self.size(rank, world) for rank in range(world))

    def share(self, count: int, rank: int, world: int) -> int:
        """The rank's part of `count` things of which the dim holds each an equal number of elements (heads, say)."""
        full = sum(block.size for block in self.blocks)
        assert count * self.size(rank, world) % full == 0, (count, full)
        return count * self.size(rank, world) // full

    def runs(self, rank: int, world: int) -> list[tuple[int, int]]:
        """`(start, length)` along `dim` of what the rank keeps."""
        runs, offset = [], 0
        for block in self.blocks:
            start, stop = block.bounds(rank, world)
            runs.append((offset + start, stop - start))
            offset += block.size
        return runs

    def take(self, full: torch.Tensor, rank: int, world: int) -> torch.Tensor | None:
        """The rank's slice of `full`, as a contiguous tensor of its own; None where the rank keeps nothing."""
        if self.dim is None:
            return full.clone() if rank == 0 else None
        parts = [full.narrow(self.dim, start, length) for start, length in self.runs(rank, world)]
        return torch.cat(parts, dim=self.dim).contiguous()

    def put(self, full: torch.Tensor, local: torch.Tensor, rank: int, world: int) -> None:
        """Write the rank's slice to its place in `full`: the inverse of `take`."""
        offset = 0
        for start, length in self.runs(rank, world):
            full.narrow(self.dim, start, length).copy_(local.narrow(self.dim, offset, length))
            offset += length

    def local_shape(self, full_shape: torch.Size, rank: int, world: int) -> torch.Size:
        """Of the rank's slice; only where a dim is cut."""
        shape = list(full_shape)
        shape[self.dim] = self.size(rank, world)
        return torch.Size(shape)
