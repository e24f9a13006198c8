"""Attention over two sets of keys, from attention over each, merged by their log-sum-exp."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..distributed.triton_kernels import kernel_if_right


def merge(
    out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, into: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`(out, lse)` over both sets of keys; computed in float32 (float64 for float64), `lse` in that dtype.

    The weight of each is its share of the softmax' denominator, `sigmoid` of the difference of the two `lse`.

    Args:
        out: [B, S, H, D], overwritten; part: [B, S, H, D].
        lse, part_lse: [B, S, H]; -inf where there was no key.
        into: [B, S, H, D], for the result; by default `out`, or a new tensor where that is of a narrower dtype.
    """
    wide = torch.promote_types(out.dtype, torch.float32)
    if into is None:
        into = out if out.dtype == wide else torch.empty(out.shape, dtype=wide, device=out.device)
    merge_rows = _kernel_for(out.device) if out.device.type != "cpu" and wide == torch.float32 else None
    return into, (merge_rows or _merge_rows)(out, lse, part, part_lse, into)


def _merge_rows(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, into: Tensor) -> Tensor:
    """By torch's operations: what the kernel is held to. Returns the `lse` of both."""
    wide = torch.promote_types(out.dtype, torch.float32)
    shares = (torch.sigmoid(lse - part_lse), torch.sigmoid(part_lse - lse))
    kept, added = (share.nan_to_num(0)[..., None] for share in shares)  # neither has a key
    merged = out.to(wide).mul_(kept).addcmul_(part, added)
    if merged is not into:
        into.copy_(merged)
    return torch.logaddexp(lse, part_lse)


@functools.cache
def _kernel_for(device: torch.device) -> Callable[..., Tensor] | None:
    """One kernel in place of torch's operations."""

    def load() -> Callable[..., Tensor]:
        from .attention_merge_triton import merge_rows

        return merge_rows

    def is_right(kernel: Callable[..., Tensor]) -> bool:
        parts = torch.linspace(-1, 1, 2 * 4 * 16, device=device).view(2, 1, 4, 1, 16)
        none = -torch.inf
        lses = torch.tensor([[0, 1, none, none], [2, -1, 1, none]], device=device).view(2, 1, 4, 1)
        answers = []
        for each in (kernel, _merge_rows):
            into = torch.empty_like(parts[0])
            answers.append((into, each(parts[0].clone(), lses[0], parts[1], lses[1], into)))
        return all(torch.allclose(found, wanted, atol=1e-5) for found, wanted in zip(*answers, strict=True))

    return kernel_if_right(load, is_right, "attention's parts are merged")
