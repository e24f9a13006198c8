"""Weights that torchao has quantised, seen as the plain tensors that they are made of: integers, scales, zero points.

A shard's runs are cut from each of these where they are. Scales that hold for whole rows are every rank's, where rows
are cut; those of a group of a row's elements are cut between groups. Nothing is dequantised.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor  # the planner's, which have no values

from .agreement import fingerprints
from .axis import Axis
from .collectives import all_gather_int64
from .sharding import Block, Shard


# torchao's tensors whose parts are laid out as what they stand for; others are packed for a kernel of theirs.
CUTTABLE = ("Int8Tensor", "Float8Tensor", "IntxUnpackedToInt8Tensor")


def is_quantized(x: Tensor) -> bool:
    """Is it a tensor of torchao?"""
    return type(x).__module__.startswith("torchao.") and hasattr(x, "tensor_data_names")


def is_plain(weight: Tensor) -> bool:
    """Is it a parameter of numbers as they are? Asked in a way that the compiler can follow."""
    return type(weight) in (torch.nn.Parameter, FakeTensor)


def is_cuttable(x: Tensor) -> bool:
    """Is it a plain tensor, or one of torchao that can be cut?"""
    return type(x.data) in (Tensor, FakeTensor) or is_quantized(x) and type(x).__name__ in CUTTABLE


def parts(x: Tensor) -> dict[str, Tensor]:
    """The plain tensors that `x` is made of, by name; of a plain one, itself."""
    if not is_quantized(x):
        return {"": x}
    names = (*x.tensor_data_names, *getattr(x, "optional_tensor_data_names", ()))
    return {name: getattr(x, name) for name in names if getattr(x, name) is not None}


def _attributes(x: Tensor) -> dict[str, Any]:
    """What a quantised tensor is made of besides its parts."""
    names = (*getattr(x, "tensor_attribute_names", ()), *getattr(x, "optional_tensor_attribute_names", ()))
    return {name: getattr(x, name) for name in names}


def with_parts(like: Tensor, made_of: dict[str, Tensor], shape: torch.Size) -> Tensor:
    """A tensor as `like`, of this shape, made of these parts."""
    if not is_quantized(like):
        return made_of[""]
    attributes, scale = _attributes(like), made_of["scale"]
    # How many elements have a scale in common, in each dim.
    counts = scale.shape if scale.ndim == len(shape) else (1,) * len(shape)
    common = (size // count for size, count in zip(shape, counts, strict=True))
    attributes["block_size"] = type(like.block_size)(common)
    return type(like)(**made_of, **attributes)


def kind(x: Tensor) -> str:
    """What must be the same where several tensors are parts of one, or copies: all but shapes and values."""
    if not is_quantized(x):
        return str(x.dtype).removeprefix("torch.")
    said = {name: value for name, value in _attributes(x).items() if name != "block_size"}
    return f"{type(x).__name__} of {', '.join(f'{name} {kind(part)}' for name, part in parts(x).items())}; {said}"


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


def when_cut(x: Tensor, shard: Shard) -> dict[str, Shard | None]:
    """How the parts of `x` are laid out where it is cut by the shard; None for what all ranks have.

    Raises:
        ValueError: groups of elements with a scale in common would be cut.
    """
    if not is_quantized(x):
        return {"": shard}
    return {name: shard_of_part(shard, part.shape, x.shape) for name, part in parts(x).items()}


def take(shard: Shard, full: Tensor, rank: int, world: int) -> Tensor | None:
    """`shard.take`, of a quantised tensor too."""
    if not is_quantized(full):
        return shard.take(full, rank, world)
    cut, made_of = when_cut(full, shard), parts(full)
    local = {name: x.clone() if cut[name] is None else cut[name].take(x, rank, world) for name, x in made_of.items()}
    return with_parts(full, local, shard.local_shape(full.shape, rank, world))


def layouts(
    local: Tensor, shard: Shard, shape: torch.Size, axis: Axis, known: dict[str, Shard | None] | None = None
) -> dict[str, Shard | None]:
    """How the parts of a tensor of this shape, of which each rank has its shard, are laid out; None for what all have.

    That is `known` of what was cut. What was quantised later tells by its sizes: all ranks of the axis must call it.

    Raises:
        ValueError: shards that were quantised each by itself, which no whole tensor is made of; on all ranks.
    """
    if not is_quantized(local):
        return {"": shard}
    made_of = parts(local)
    if known is not None and known.keys() == made_of.keys():
        return known
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
