"""`merge` as one kernel: everything is read and written once, where torch's operations take five passes."""

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor


ROWS = 16


@triton.jit
def _merge_kernel(
    out, lse, part, part_lse, into, merged_lse,
    out_b, out_s, out_h, lse_b, lse_s, lse_h, part_b, part_s, part_h, part_lse_b, part_lse_s, part_lse_h,
    into_b, into_s, into_h,
    rows, S, H, D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    b, s, h = row // (S * H), row // H % S, row % H
    a = tl.load(lse + b * lse_b + s * lse_s + h * lse_h, exists, float("-inf"))
    c = tl.load(part_lse + b * part_lse_b + s * part_lse_s + h * part_lse_h, exists, float("-inf"))
    high = tl.maximum(a, c)
    top = tl.where(high == float("-inf"), 0.0, high)  # neither has a key
    of_out, of_part = tl.exp(a - top), tl.exp(c - top)
    total = of_out + of_part
    share = tl.where(total > 0, 1 / total, 0.0)
    tl.store(merged_lse + row, top + tl.log(total), exists)
    column = tl.arange(0, COLUMNS)[None, :]
    kept = exists[:, None] & (column < D)
    x = tl.load(out + (b * out_b + s * out_s + h * out_h)[:, None] + column, kept, 0.0).to(tl.float32)
    y = tl.load(part + (b * part_b + s * part_s + h * part_h)[:, None] + column, kept, 0.0).to(tl.float32)
    merged = x * (of_out * share)[:, None] + y * (of_part * share)[:, None]
    tl.store(into + (b * into_b + s * into_s + h * into_h)[:, None] + column, merged, kept)


def merge_rows(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, into: Tensor) -> Tensor:
    """Fill `into`, which may be `out`, with both merged. Shapes as in `merge`; returns the log-sum-exp [B, S, H]."""
    out, part = (x if x.stride(-1) == 1 else x.contiguous() for x in (out, part))
    assert into.stride(-1) == 1, into.stride()
    batch, length, heads, dim = out.shape
    merged_lse = torch.empty(lse.shape, dtype=torch.float32, device=lse.device)
    strides = [stride for x in (out, lse, part, part_lse, into) for stride in x.stride()[:3]]
    rows = batch * length * heads
    with contextlib.nullcontext() if out.is_cpu else torch.get_device_module(out.device).device(out.device):
        _merge_kernel[(triton.cdiv(rows, ROWS),)](
            out, lse, part, part_lse, into, merged_lse, *strides,
            rows, length, heads, dim, triton.next_power_of_2(dim), ROWS,
        )  # fmt: skip
    return merged_lse
