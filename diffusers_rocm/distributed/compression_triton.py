"""`compression` as a kernel each way, whose programs have some groups each."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compression import GROUP, RECORD, compressed_size


# Of a program.
GROUPS = 32

_WORDS = RECORD // 4


@triton.jit
def _compress_kernel(
    x, records, scales, count, GROUP: tl.constexpr, RECORD: tl.constexpr, WORDS: tl.constexpr, GROUPS: tl.constexpr
):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    of_group = tl.arange(0, GROUP)[None, :]
    at = group[:, None] * GROUP + of_group
    values = tl.load(x + at, at < count, 0.0).to(tl.float32)
    # A maximum would pass over what is not a number; a sum does not, and of numbers 0 times it is 0.
    scale = tl.max(tl.abs(values), 1) / 127 + 0.0 * tl.sum(values, 1)
    rounded = tl.floor(values / tl.maximum(scale, 1e-30)[:, None] + 0.5)
    exists = group * GROUP < count
    tl.store(records + group[:, None] * RECORD + of_group, rounded.to(tl.int8), exists[:, None])
    tl.store(scales + group * WORDS + GROUP // 4, scale, exists)


@triton.jit
def _decompress_kernel(
    records, scales, into, count, GROUP: tl.constexpr, RECORD: tl.constexpr, WORDS: tl.constexpr, GROUPS: tl.constexpr
):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    of_group = tl.arange(0, GROUP)[None, :]
    at = group[:, None] * GROUP + of_group
    values = tl.load(records + group[:, None] * RECORD + of_group, at < count, 0).to(tl.float32)
    scale = tl.load(scales + group * WORDS + GROUP // 4, group * GROUP < count, 0.0)
    tl.store(into + at, values * scale[:, None], at < count)


def compress(x: Tensor) -> Tensor:
    """As in `compression`; of what is contiguous."""
    assert x.is_contiguous(), x.stride()
    records = torch.empty(compressed_size(x.numel()), dtype=torch.uint8, device=x.device)
    given = x, records.view(torch.int8), records.view(torch.float32), x.numel()
    with torch.cuda.device(x.device):
        _compress_kernel[_programs(x)](*given, GROUP, RECORD, _WORDS, GROUPS)
    return records


def decompress(records: Tensor, into: Tensor) -> Tensor:
    """As in `compression`, into what is contiguous, of as many elements as were compressed."""
    assert into.is_contiguous() and records.is_contiguous(), (into.stride(), records.stride())
    given = records.view(torch.int8), records.view(torch.float32), into, into.numel()
    with torch.cuda.device(into.device):
        _decompress_kernel[_programs(into)](*given, GROUP, RECORD, _WORDS, GROUPS)
    return into


def _programs(x: Tensor) -> tuple[int]:
    return (triton.cdiv(x.numel(), GROUP * GROUPS),)
