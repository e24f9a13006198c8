"""`compression` as a kernel each way, whose programs have some groups each, two to a record."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compression import GROUP, RECORD_BYTES, TINY, compressed_size


# Of a program.
GROUPS = 64


@triton.jit
def _compress_kernel(
    x, records, scales, count, TINY: tl.constexpr, GROUP: tl.constexpr, BYTES: tl.constexpr, GROUPS: tl.constexpr
):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    record, second = group // 2, group % 2
    of_group = tl.arange(0, GROUP)[None, :]
    at = group[:, None] * GROUP + of_group
    values = tl.load(x + at, at < count, 0.0).to(tl.float32)
    # A maximum would pass over what is not a number; a sum does not, and of numbers 0 times it is 0.
    scale = (tl.max(tl.abs(values), 1) / 127 + 0.0 * tl.sum(values, 1)).to(tl.bfloat16)
    rounded = tl.floor(values / tl.maximum(scale.to(tl.float32), TINY)[:, None] + 0.5)
    rounded = tl.minimum(rounded, 127)  # more, where a scale was cut off and not rounded
    exists = record * 2 * GROUP < count
    tl.store(records + (record * BYTES + second * GROUP)[:, None] + of_group, rounded.to(tl.int8), exists[:, None])
    tl.store(scales + record * (BYTES // 2) + GROUP + second, scale, exists)


@triton.jit
def _decompress_kernel(
    records, scales, into, count, MOST: tl.constexpr, GROUP: tl.constexpr, BYTES: tl.constexpr, GROUPS: tl.constexpr
):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    record, second = group // 2, group % 2
    of_group = tl.arange(0, GROUP)[None, :]
    at = group[:, None] * GROUP + of_group
    values = tl.load(records + (record * BYTES + second * GROUP)[:, None] + of_group, at < count, 0).to(tl.float32)
    scale = tl.load(scales + record * (BYTES // 2) + GROUP + second, group * GROUP < count, 0.0).to(tl.float32)
    # A scale that was rounded up would make the largest number infinite.
    product = values * scale[:, None]
    product = tl.where(product > MOST, MOST, tl.where(product < -MOST, -MOST, product))  # NaN stays
    tl.store(into + at, product, at < count)


def compress(x: Tensor) -> Tensor:
    """As in `compression`; of what is contiguous."""
    assert x.is_contiguous(), x.stride()
    records = torch.empty(compressed_size(x.numel()), dtype=torch.uint8, device=x.device)
    given = x, records.view(torch.int8), records.view(torch.bfloat16), x.numel()
    with torch.cuda.device(x.device):
        _compress_kernel[_programs(x)](*given, TINY, GROUP, RECORD_BYTES, GROUPS)
    return records


def decompress(records: Tensor, into: Tensor) -> Tensor:
    """As in `compression`, into what is contiguous, of as many elements as were compressed."""
    assert into.is_contiguous() and records.is_contiguous(), (into.stride(), records.stride())
    given = records.view(torch.int8), records.view(torch.bfloat16), into, into.numel()
    with torch.cuda.device(into.device):
        _decompress_kernel[_programs(into)](*given, torch.finfo(into.dtype).max, GROUP, RECORD_BYTES, GROUPS)
    return into


def _programs(x: Tensor) -> tuple[int]:
    return (triton.cdiv(x.numel(), GROUP * GROUPS),)
