"""Attention over two sets of keys, from attention over each, merged by their log-sum-exp."""

import functools
import importlib.util

import torch
from torch import Tensor


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
    if out.device.type != "cpu" and wide == torch.float32 and _has_triton():
        from .attention_merge_triton import merge_rows

        return into, merge_rows(out, lse, part, part_lse, into)
    shares = (torch.sigmoid(lse - part_lse), torch.sigmoid(part_lse - lse))
    kept, added = (share.nan_to_num(0)[..., None] for share in shares)  # neither has a key
    merged = out.to(wide).mul_(kept).addcmul_(part, added)
    return merged if merged is into else into.copy_(merged), torch.logaddexp(lse, part_lse)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
