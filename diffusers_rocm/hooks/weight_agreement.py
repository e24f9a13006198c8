"""Do all ranks start from the same weights? Two small exchanges tell, whatever the size of the model."""

from collections.abc import Collection

import torch
from torch import nn

from ..distributed.agreement import agree, fingerprints
from ..distributed.axis import Axis
from ..distributed.collectives import all_gather_int64
from ..distributed.quantized import is_quantized, kind, parts
from .tensor_parallel import sharded_modules


def first_difference(model: nn.Module, axis: Axis, names: Collection[str] | None = None) -> str | None:
    """The name of the first parameter or buffer, of those named, that is not bit-equal on all ranks; None if all are.

    Modules that are sharded already, as those of another model, hold slices, and are passed over.

    Raises:
        ValueError: the ranks hold different models: names the first parameter or buffer that has another shape or
            dtype on some rank, or is not there, on every rank.
    """
    cut = {id(getattr(module, name)) for module in sharded_modules(model) for name in module.sharding.shards}
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    wholes = {name: x for name, x in named.items() if id(x) not in cut and (names is None or name in names)}
    kinds = {name: kind(x) for name, x in wholes.items() if is_quantized(x)}
    tensors = {
        f"{name}.{part}" if part else name: x for name, whole in wholes.items() for part, x in parts(whole).items()
    }
    shapes = {name: f"{[*x.shape]} {str(x.dtype).removeprefix('torch.')}" for name, x in tensors.items()}
    agree("models", kinds | shapes, axis)
    if not tensors:
        return None
    rows = all_gather_int64(torch.tensor(fingerprints(tensors.values())), axis)
    differing = (rows != rows[0]).any(dim=0).nonzero().flatten().tolist()
    return list(tensors)[differing[0]] if differing else None
