"""Activations in 8 bits for links that are slow: lossy, and only where it is asked for by name (`communication=`).

Elements that lie next to each other are turned, eight at a time, into their sums and differences (the Walsh-Hadamard
transform, as in QuaRot, Ashkboos et al., 2024), and back where they arrive: so what is large in one channel makes its
neighbours' rounding less coarse. Groups of them are integers times a scale, which goes with them in bfloat16. Two
small groups with such scales take as many bytes as a large one with a scale in float32, and are rounded more finely.
float8 takes as many bytes and rounds more coarsely (tests/distributed/test_compression.py). What is not finite makes
its whole group NaN, and is seen where it arrives. What needs a gradient is sent as it is, and so are all three of an
attention of which one does.

On a GPU it is a kernel of Triton's each way, where that is right, which compiled code calls, too; else operations of
torch's, of which there are many.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .triton_kernels import kernel_if_right


EXACT = "exact"
COMMUNICATION = (EXACT, "int8")

# Elements that share a scale. The elements of two groups are a record, which is put together by words of four bytes.
GROUP = 16
RECORD = 2 * GROUP
RECORD_BYTES = RECORD + 2 * 2
# Elements that are turned together: a power of two, of which both kinds of `turned` take its three steps.
TURNED = 8
# The least scale that is divided by: what is smaller than 127 of them is far off, or 0.
TINY = torch.finfo(torch.float32).tiny


def compressed_size(count: int) -> int:
    """Bytes that `count` elements take."""
    return -(-count // RECORD) * RECORD_BYTES


def compress(x: Tensor) -> Tensor:
    """`x` [n] in 8 bits: [compressed_size(n)] uint8, each record's elements with the scales of its groups."""
    if _is_called(x):
        return _ours.compress(x)
    kernels = _kernels_for(x)
    if kernels is not None:
        return kernels[0](x)
    padded = torch.nn.functional.pad(x, (0, -x.numel() % RECORD)).float()
    groups = turned(padded / TURNED).view(-1, 2, GROUP)
    most = groups.abs().amax(2)
    # The compiler takes 0 times what is infinite for 0.
    scales = torch.where(most <= largest(torch.float32), most / 127, torch.nan).bfloat16()
    values = (groups / scales.float().clamp(min=TINY)[:, :, None]).round().to(torch.int8)
    words = torch.cat([values.view(-1, RECORD).view(torch.int32), scales.view(torch.int32)], 1)
    return words.view(torch.uint8).flatten()


def decompress(records: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """The `count` elements that were compressed to `records`, in `dtype`."""
    if _is_called(records):
        return _ours.decompress(records, count, dtype)
    kernels = _kernels_for(records)
    if kernels is not None:
        return kernels[1](records, records.new_empty(count, dtype=dtype))
    words = records.view(torch.int32).view(-1, RECORD_BYTES // 4)
    scales = words[:, -1:].view(torch.bfloat16).float()
    values = turned(words[:, :-1].view(torch.int8).float())
    x = (values.view(-1, 2, GROUP) * scales[:, :, None]).flatten()
    x = x.clamp(-largest(dtype), largest(dtype)).to(dtype)
    # Not by a slice: what the compiler for CPUs makes of it loses the last of a group that is not whole.
    return x if x.numel() == count else x.as_strided((count,), (1,))


def turned(x: Tensor) -> Tensor:
    """Sums and differences of each `TURNED` elements of `x` [...] that lie next to each other: [x.numel()].

    Done twice it is `TURNED` times `x`.
    """
    for distance in (1, 2, 4):
        pairs = x.reshape(-1, 2, distance)
        sign = 1 - 2 * torch.arange(2, device=x.device)[:, None]
        x = pairs.flip(1) + sign * pairs
    return x.flatten()


def largest(dtype: torch.dtype) -> float:
    """What is more becomes this: a scale that was rounded up would make the largest number infinite."""
    return min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)


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
    return _kernels_of(x.device) if x.device.type == "cuda" else None


@functools.cache
def _kernels_of(device: torch.device) -> _Kernels | None:
    def load() -> _Kernels:
        from .compression_triton import compress, decompress

        return compress, decompress

    def are_right(kernels: _Kernels) -> bool:
        x = torch.arange(9.0 * GROUP - 7, device=device).square().sin()
        x[0] = torch.nan
        records = kernels[0](x)
        y = kernels[1](records, torch.empty_like(x))
        wrong = (y - x)[GROUP:].norm() / x[GROUP:].norm()
        return bool(y[:GROUP].isnan().all()) and bool(wrong < 0.01)

    return kernel_if_right(load, are_right, "activations are compressed")


# For compiled code on a GPU: what the compiler makes of torch's operations takes three times as long as the kernels.

_library = torch.library.Library("diffusers_rocm", "FRAGMENT")
_library.define("compress(Tensor x) -> Tensor")
_library.define("decompress(Tensor records, SymInt count, ScalarType dtype) -> Tensor")
_library.impl("compress", lambda x: compress(x.contiguous()), "CUDA")
_library.impl("decompress", lambda records, *to: decompress(records.contiguous(), *to), "CUDA")
_ours = torch.ops.diffusers_rocm


@torch.library.register_fake("diffusers_rocm::compress", lib=_library)
def _(x):
    return x.new_empty(compressed_size(x.numel()), dtype=torch.uint8)


@torch.library.register_fake("diffusers_rocm::decompress", lib=_library)
def _(records, count, dtype):
    return records.new_empty(count, dtype=dtype)


def _is_called(x: Tensor) -> bool:
    return x.device.type == "cuda" and torch.compiler.is_compiling()
