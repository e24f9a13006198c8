"""Activations in 8 bits for links that are slow: lossy, and only where it is asked for by name (`communication=`).

Groups of elements that lie next to each other are integers times a scale, which goes with them in bfloat16. Two small
groups with such scales take as many bytes as a large one with a scale in float32, and are rounded more finely. float8
takes as many bytes and rounds more coarsely (tests/distributed/test_compression.py). What is not finite makes its
whole group NaN, and is seen where it arrives. With gradients nothing is lossy.

Compiled code has it as operations that the compiler joins with what is around; else it is a kernel of Triton's each
way, where that is right, and operations of torch's, of which there are ten, where it is not.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .triton_kernels import kernel_if_right


EXACT = "exact"
COMMUNICATION = (EXACT, "int8")

# Elements that share a scale. The elements of two groups are a record, which is put together by words of four bytes.
GROUP = 32
RECORD = 2 * GROUP
RECORD_BYTES = RECORD + 2 * 2
# The least scale that is divided by.
TINY = torch.finfo(torch.float32).tiny


def compressed_size(count: int) -> int:
    """Bytes that `count` elements take."""
    return -(-count // RECORD) * RECORD_BYTES


def compress(x: Tensor) -> Tensor:
    """`x` [n] in 8 bits: [compressed_size(n)] uint8, each record's elements with the scales of its groups."""
    kernels = _kernels_for(x)
    if kernels is not None:
        return kernels[0](x)
    groups = torch.nn.functional.pad(x, (0, -x.numel() % RECORD)).view(-1, 2, GROUP).float()
    largest = groups.abs().amax(2)
    # The compiler takes 0 times what is infinite for 0.
    scales = torch.where(largest <= torch.finfo(torch.float32).max, largest / 127, torch.nan).bfloat16()
    values = (groups / scales.float().clamp(min=TINY)[:, :, None]).round().to(torch.int8)
    words = torch.cat([values.view(-1, RECORD).view(torch.int32), scales.view(torch.int32)], 1)
    return words.view(torch.uint8).flatten()


def decompress(records: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """The `count` elements that were compressed to `records`, in `dtype`."""
    kernels = _kernels_for(records)
    if kernels is not None:
        return kernels[1](records, records.new_empty(count, dtype=dtype))
    words = records.view(torch.int32).view(-1, RECORD_BYTES // 4)
    scales = words[:, -1:].view(torch.bfloat16).float()
    x = (words[:, :-1].view(torch.int8).view(-1, 2, GROUP) * scales[:, :, None]).flatten()
    # A scale that was rounded up would make the largest number infinite.
    x = x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)
    # Not by a slice: what the compiler for CPUs makes of it loses the last of a group that is not whole.
    return x if x.numel() == count else x.as_strided((count,), (1,))


def compress_parts(x: Tensor, counts: Sequence[int]) -> Tensor:
    """`x` [sum(counts)], each part by itself, so that it can be sent by itself."""
    if not any(count % RECORD for count in counts):
        return compress(x)
    return torch.cat([compress(part) for part in x.split(counts)])


def decompress_parts(records: Tensor, counts: Sequence[int], dtype: torch.dtype) -> Tensor:
    """What was compressed part by part: [sum(counts)]."""
    if not any(count % RECORD for count in counts):
        return decompress(records, sum(counts), dtype)
    parts = zip(records.split([compressed_size(count) for count in counts]), counts, strict=True)
    return torch.cat([decompress(part, count, dtype) for part, count in parts])


def decompress_into(x: Tensor, records: Tensor) -> None:
    """Put into `x` [...], contiguous, what was compressed to `records`."""
    kernels = _kernels_for(records)
    if kernels is not None:
        kernels[1](records, x)
    else:
        x.copy_(decompress(records, x.numel(), x.dtype).view_as(x))


_Kernels = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]


def _kernels_for(x: Tensor) -> _Kernels | None:
    return None if torch.compiler.is_compiling() or x.device.type != "cuda" else _kernels_of(x.device)


@functools.cache
def _kernels_of(device: torch.device) -> _Kernels | None:
    def load() -> _Kernels:
        from .compression_triton import compress, decompress

        return compress, decompress

    def are_right(kernels: _Kernels) -> bool:
        x = torch.linspace(-3, 5, 9 * GROUP - 7, device=device)
        x[0] = torch.nan
        records = kernels[0](x)
        y = kernels[1](records, torch.empty_like(x))
        rest = (y - x)[GROUP:].abs()
        return bool(y[:GROUP].isnan().all()) and bool((rest <= 0.51 * 5 / 127).all())

    return kernel_if_right(load, are_right, "activations are compressed")
