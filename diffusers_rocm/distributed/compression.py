"""Activations in 8 bits for links that are slow: lossy, and only where it is asked for by name (`communication=`).

Groups of elements that lie next to each other are integers times a scale, which goes with them in float32. float8
takes as many bytes and rounds more coarsely (tests/distributed/test_compression.py). What is not finite makes its
whole group NaN, and is seen where it arrives. With gradients nothing is lossy.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


EXACT = "exact"
COMMUNICATION = (EXACT, "int8")

# Elements that share a scale, and the bytes of both.
GROUP = 64
RECORD = GROUP + 4


def compressed_size(count: int) -> int:
    """Bytes that `count` elements take."""
    return -(-count // GROUP) * RECORD


def compress(x: Tensor) -> Tensor:
    """`x` [n] in 8 bits: [compressed_size(n)] uint8, each group of elements with its scale after it."""
    groups = torch.nn.functional.pad(x, (0, -x.numel() % GROUP)).view(-1, GROUP).float()
    scale = groups.abs().amax(1) / 127
    values = (groups / scale.clamp(min=1e-30)[:, None]).round().to(torch.int8)
    # Put together by words of four bytes, not by single ones.
    words = torch.cat([values.view(torch.int32), scale.view(torch.int32)[:, None]], 1)
    return words.view(torch.uint8).flatten()


def decompress(records: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """The `count` elements that were compressed to `records`, in `dtype`."""
    words = records.view(torch.int32).view(-1, RECORD // 4)
    scale = words[:, -1:].view(torch.float32)
    x = (words[:, :-1].view(torch.int8) * scale).flatten().to(dtype)
    # Not by a slice: what the compiler for CPUs makes of it loses the last of a group that is not whole.
    return x if x.numel() == count else x.as_strided((count,), (1,))


def compress_parts(x: Tensor, counts: Sequence[int]) -> Tensor:
    """`x` [sum(counts)], each part by itself, so that it can be sent by itself."""
    if not any(count % GROUP for count in counts):
        return compress(x)
    return torch.cat([compress(part) for part in x.split(counts)])


def decompress_parts(records: Tensor, counts: Sequence[int], dtype: torch.dtype) -> Tensor:
    """What was compressed part by part: [sum(counts)]."""
    if not any(count % GROUP for count in counts):
        return decompress(records, sum(counts), dtype)
    parts = zip(records.split([compressed_size(count) for count in counts]), counts, strict=True)
    return torch.cat([decompress(part, count, dtype) for part, count in parts])
