"""Do all ranks start from the same weights? One small exchange tells, whatever the size of the model."""

import zlib

import torch
from torch import nn

from ..distributed.axis import Axis
from ..distributed.collectives import all_gather_int64


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """A scalar int64 of the tensor's bits that depends on their order: row sums, weighted by the row's number."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    words = tensor.view(_WORDS[tensor.element_size()])
    rows = words.reshape(-1, words.shape[-1] if words.ndim > 1 else 1).sum(dim=1, dtype=torch.int64)
    weights = torch.arange(len(rows), device=rows.device) * 2 + 1
    return (rows * weights).sum()


def first_difference(model: nn.Module, axis: Axis) -> str | None:
    """The name of the first parameter or buffer that is not bit-equal on all ranks; None where all are.

    Raises:
        ValueError: the ranks hold different models (names, shapes or dtypes).
    """
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    signature = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()]
    crc = torch.tensor([zlib.crc32(repr(signature).encode())])
    if len(all_gather_int64(crc, axis).unique()) > 1:
        raise ValueError(
            f"the ranks hold different models: parameter names, shapes or dtypes differ over the {axis.size} ranks of "
            f"axis {axis.name}; build the same model with the same dtype on each"
        )
    rows = all_gather_int64(torch.stack([_fingerprint(tensor).cpu() for tensor in tensors.values()]), axis)
    differing = (rows != rows[0]).any(dim=0).nonzero().flatten().tolist()
    return list(tensors)[differing[0]] if differing else None
