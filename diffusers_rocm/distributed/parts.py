"""The sum of what all ranks made a part of, in one pass where torch's own reduction takes twice as long."""

import functools
import importlib.util
import logging
from collections.abc import Callable

import torch
from torch import Tensor


logger = logging.getLogger(__name__)


def sum_parts(parts: Tensor) -> Tensor:
    """[n, ...] of [parts, n, ...], contiguous; computed in float32, or wider where they are."""
    narrow = parts.dtype != torch.float64
    kernel = _kernel_for(parts.device) if narrow and parts.device.type == "cuda" else None
    return parts.sum(0) if kernel is None else kernel(parts)


@functools.cache
def _kernel_for(device: torch.device) -> Callable[[Tensor], Tensor] | None:
    """The kernel, where Triton is there, can compile it, and then computes the same."""
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        from .parts_triton import sum_parts

        parts = torch.linspace(-1, 1, 3 * 5, device=device).view(3, 5)
        if torch.allclose(sum_parts(parts), parts.sum(0), atol=1e-5):
            return sum_parts
        reason = "Triton's kernel is wrong here"
    except Exception as error:  # it needs a C compiler
        reason = f"Triton cannot compile: {error}"
    logger.warning(f"parts are summed by torch's operations, since {reason}")
    return None
