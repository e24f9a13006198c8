"""Weights that torchao has quantised, seen as the plain tensors that they are made of: integers, scales, zero points.

A shard's runs are cut from each of these where they are. Scales that hold for whole rows are every rank's, where rows
are cut; those of a group of a row's elements are cut between groups. Nothing is dequantised.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .agreement import fingerprints
from .axis import Axis
from .collectives import all_gather_int64
from .sharding import Block, Shard


# torchao's tensors whose parts are laid out as what they stand for; others are packed for a kernel of theirs.
CUTTABLE = ("Int8Tensor", "Float8Tensor", "IntxUnpackedToInt8Tensor")


def is_quantized(x: Tensor) -> bool:
    """Is it a tensor of torchao that can be cut?"""
    return type(x).__name__ in CUTTABLE and type(x).__module__.startswith("torchao.")


def parts(x: Tensor) -> dict[str, Tensor]:
    """The plain tensors that `x` is made of, by name; of a plain one, itself."""
    if not is_quantized(x):
        return {"": x}
    names = (*x.tensor_data_names, *getattr(x, "optional_tensor_data_names", ()))
    return {name: getattr(x, name) for name in names if getattr(x, name) is not None}


def with_parts(like: Tensor, made_of: dict[str, Tensor], shape: torch.Size) -> Tensor:
    """A tensor as `like`, of this shape, made of these parts."""
    if not is_quantized(like):
        return made_of[""]
    names = (*getattr(like, "tensor_attribute_names", ()), *getattr(like, "optional_tensor_attribute_names", ()))
    attributes = {name: getattr(like, name) for name in names}
    block = attributes["block_size"]  # how many elements have a scale in common: all of a dim, or a group
    attributes["block_size"] = type(block)(
        size if common == whole else common for size, common, whole in zip(shape, block, like.shape, strict=True)
    )
    return type(like)(**made_of, **attributes)


def on_parts(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of each part, which keeps its shape."""
    return with_parts(x, {name: function(part) for name, part in parts(x).items()}, x.shape)


def shard_of_part(shard: Shard, part: Sequence[int], shape: Sequence[int]) -> Shard | None:
    """How a part, of one shape, of a tensor of another is laid out where that is laid out as `shard`; None: uncut.

    Raises:
        ValueError: groups of elements with a scale in common would be cut, or the part is for something else.
    """
    if math.prod(part) == 1 or len(part) == len(shape) and part[shard.dim] == 1:
        return None
    if len(part) != len(shape):
        raise ValueError(f"a part of it is {[*part]} where it is {[*shape]}")
    group, rest = divmod(shape[shard.dim], part[shard.dim])
    unit = math.gcd(*(block.unit for block in shard.blocks))
    if rest or unit % group:
        raise ValueError(f"{group} elements have a scale in common, and ranks keep multiples of {unit}")
    return Shard(shard.dim, tuple(Block(block.size // group, block.unit // group) for block in shard.blocks))


def take(shard: Shard, full: Tensor, rank: int, world: int) -> Tensor | None:
    """`shard.take`, of a quantised tensor too."""
    if not is_quantized(full):
        return shard.take(full, rank, world)
    made_of = {}
    for name, part in parts(full).items():
        layout = shard_of_part(shard, part.shape, full.shape)
        made_of[name] = part.clone() if layout is None else layout.take(part, rank, world)
    return with_parts(full, made_of, shard.local_shape(full.shape, rank, world))


def layouts(local: Tensor, shard: Shard, shape: torch.Size, axis: Axis) -> dict[str, Shard | None]:
    """How the parts of a tensor of this shape, of which each rank has its shard, are laid out; None for what all have.

    All ranks of the axis must call it.

    Raises:
        ValueError: shards that were quantised each by itself, which no whole tensor is made of; on all ranks.
    """
    if not is_quantized(local):
        return {"": shard}
    made_of = parts(local)
    counts = [part.shape[shard.dim] if part.ndim == len(shape) else 1 for part in made_of.values()]
    prints = fingerprints(made_of.values())
    by_rank = all_gather_int64(torch.tensor([counts, prints]).flatten(), axis).view(axis.size, 2, -1)
    found = {}
    for index, name in enumerate(made_of):
        of_part = by_rank[:, 0, index]
        if (of_part > 1).any():
            whole = [*shape[: shard.dim], int(of_part.sum()), *shape[shard.dim + 1 :]]
            found[name] = shard_of_part(shard, whole, shape)
        elif len(by_rank[:, 1, index].unique()) == 1:
            found[name] = None
        else:
            raise ValueError(f"each rank has a {name} of its own for the same elements")
    return found
