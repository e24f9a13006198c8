"""`compression` as a kernel each way, whose programs have some groups each, two to a record."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compression import GROUP, RECORD_BYTES, TINY, TURNED, compressed_size, largest


# Of a program.
GROUPS = 128


@triton.jit
def _turned(x, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """As `compression.turned`: an element's place among eight has three bits, which take turns to be the last."""
    x = tl.reshape(x, (GROUPS * GROUP // 8, 2, 2, 2))
    for _ in tl.static_range(3):
        first, second = tl.split(x)
        x = tl.permute(tl.join(first + second, first - second), (0, 3, 1, 2))
    return tl.reshape(x, (GROUPS, GROUP))


@triton.jit
def _compress_kernel(
    x,
    records,
    scales,
    count,
    TINY: tl.constexpr,
    TURNED: tl.constexpr,
    GROUP: tl.constexpr,
    BYTES: tl.constexpr,
    GROUPS: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    record, second = group // 2, group % 2
    of_group = tl.arange(0, GROUP)[None, :]
    at = group[:, None] * GROUP + of_group
    values = _turned(tl.load(x + at, at < count, 0.0).to(tl.float32) / TURNED, GROUPS, GROUP)
    # A maximum would pass over what is not a number; a sum of 0 times each does not, and of numbers it is 0.
    scale = (tl.max(tl.abs(values), 1) / 127 + tl.sum(0.0 * values, 1)).to(tl.bfloat16)
    rounded = tl.floor(values / tl.maximum(scale.to(tl.float32), TINY)[:, None] + 0.5)
    rounded = tl.minimum(rounded, 127)  # more, where a scale was cut off and not rounded
    exists = record * 2 * GROUP < count
    tl.store(records + (record * BYTES + second * GROUP)[:, None] + of_group, rounded.to(tl.int8), exists[:, None])
    tl.store(scales + record * (BYTES // 2) + GROUP + second, scale, exists)


@triton.jit
def _decompress_kernel(
    records,
    scales,
    into,
    count,
    MOST: tl.constexpr,
    GROUP: tl.constexpr,
    BYTES: tl.constexpr,
    GROUPS: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    record, second = group // 2, group % 2
    of_group = tl.arange(0, GROUP)[None, :]
    at = group[:, None] * GROUP + of_group
    place, exists = (record * BYTES + second * GROUP)[:, None] + of_group, (group * GROUP < count)[:, None]
    values = _turned(tl.load(records + place, exists, 0).to(tl.float32), GROUPS, GROUP)
    scale = tl.load(scales + record * (BYTES // 2) + GROUP + second, group * GROUP < count, 0.0).to(tl.float32)
    product = values * scale[:, None]
    product = tl.where(product > MOST, MOST, tl.where(product < -MOST, -MOST, product))  # NaN stays
    tl.store(into + at, product, at < count)


def compress(x: Tensor) -> Tensor:
    """As in `compression`; of what is contiguous."""
    assert x.is_contiguous(), x.stride()
    records = torch.empty(compressed_size(x.numel()), dtype=torch.uint8, device=x.device)
    given = x, records.view(torch.int8), records.view(torch.bfloat16), x.numel()
    with torch.cuda.device(x.device):
        _compress_kernel[_programs(x)](*given, TINY, TURNED, GROUP, RECORD_BYTES, GROUPS)
    return records


def decompress(records: Tensor, into: Tensor) -> Tensor:
    """As in `compression`, into what is contiguous, of as many elements as were compressed."""
    assert into.is_contiguous() and records.is_contiguous(), (into.stride(), records.stride())
    given = records.view(torch.int8), records.view(torch.bfloat16), into, into.numel()
    with torch.cuda.device(into.device):
        _decompress_kernel[_programs(into)](*given, largest(into.dtype), GROUP, RECORD_BYTES, GROUPS)
    return into


def _programs(x: Tensor) -> tuple[int]:
    return (triton.cdiv(x.numel(), GROUP * GROUPS),)
