"""Do all ranks start from the same weights? One small exchange tells, whatever the size of the model."""

import zlib

import torch
from torch import nn

from ..distributed.axis import Axis
from ..distributed.collectives import all_gather_int64


def _place_weights() -> torch.Tensor:
    return torch.randint(-(2**62), 2**62, (1024,), generator=torch.Generator().manual_seed(0)) * 2 + 1


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """A scalar int64 of the tensor's bits and their order.

    A dot product of the words of 8 bytes with weights that differ by their place in a run of 1024, the runs weighted
    by their number. Integer arithmetic wraps, so odd weights lose no bit.
    """
    tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    data = tensor.contiguous().flatten()
    if data.stride() != (1,):  # of one element, say, that was expanded
        data = data.clone(memory_format=torch.contiguous_format)
    data = data.view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    words, rest = data[: data.numel() // 8 * 8].view(torch.int64), data[data.numel() // 8 * 8 :]
    whole = words.numel() // 1024 * 1024
    weights = _place_weights().to(words.device)
    sums = torch.cat([(words[:whole].view(-1, 1024) * weights).sum(dim=1), words[whole:], rest.long()])
    return (sums * (torch.arange(sums.numel(), device=sums.device) * 2 + 1)).sum()


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
    rows = all_gather_int64(torch.stack([fingerprint(tensor).cpu() for tensor in tensors.values()]), axis)
    differing = (rows != rows[0]).any(dim=0).nonzero().flatten().tolist()
    return list(tensors)[differing[0]] if differing else None
