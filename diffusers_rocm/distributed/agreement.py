"""Do all ranks hold the same values? One small exchange tells; where they do not, a second one says what differs."""

import functools
import json
import math
import re
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from . import name_ranks
from .axis import Axis
from .collectives import all_gather_int64, all_gather_text


# Two GPUs, or two libraries, may round the same embeddings so differently (relative L2); another prompt is at 0.3 and
# more. What has few elements (timesteps, guidance) is not computed, and must be equal.
ROUNDING, FEW = 0.03, 64


@functools.cache
def _place_weights(device: torch.device) -> Tensor:
    return (torch.randint(-(2**62), 2**62, (1024,), generator=torch.Generator().manual_seed(0)) * 2 + 1).to(device)


def _words(tensor: Tensor) -> Tensor:
    """The tensor's bits as int64 [n], with zeros to fill the last one."""
    with torch._C.DisableTorchFunctionSubclass():  # GGUF's tensors answer with their own kind, of any shape
        tensor = tensor.detach().as_subclass(Tensor)
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    data = tensor.contiguous().flatten()
    if data.stride() != (1,):  # of one element, say, that was expanded
        data = data.clone(memory_format=torch.contiguous_format)
    data = data.view(torch.uint8)
    if data.numel() % 8:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 8))
    elif data.storage_offset() % 8:
        data = data.clone()
    return data.view(torch.int64)


def _weighed(words: Tensor) -> Tensor:
    """A scalar int64: a dot product with weights that differ by their place in a run of 1024 words, the runs weighted
    by their number. Integer arithmetic wraps, so odd weights lose no bit."""
    whole = words.numel() // 1024 * 1024
    runs = words[:whole].view(-1, 1024) * _place_weights(words.device)
    sums = torch.cat([runs.sum(dim=1), words[whole:]])
    return (sums * (torch.arange(sums.numel(), device=sums.device) * 2 + 1)).sum()


def fingerprint(tensor: Tensor) -> Tensor:
    """A scalar int64 of the tensor's bits and their order."""
    return _weighed(_words(tensor))


def fingerprints(tensors: Collection[Tensor]) -> list[int]:
    """`fingerprint` of each; a device is waited for once."""
    scalars = [fingerprint(x) for x in tensors]
    found = [0] * len(scalars)
    for device in {x.device for x in scalars}:
        here = [index for index, x in enumerate(scalars) if x.device == device]
        for index, value in zip(here, torch.stack([scalars[index] for index in here]).tolist(), strict=True):
            found[index] = value
    return found


def agree(what: str, values: Mapping[str, Any], axis: Axis) -> bool:
    """Are the values the same on all ranks of the axis, but for rounding? One exchange of 8 bytes if they are.

    Returns:
        Whether all tensors are bit-equal; the answer is the same on all ranks.

    Raises:
        ValueError: they are not the same; names what differs, the ranks and some of their values, on every rank.
    """
    tensors = {name: x.detach() for name, x in values.items() if isinstance(x, Tensor)}
    others = {name: _words_of(x) for name, x in values.items() if not isinstance(x, Tensor)}
    if len(all_gather_int64(_digest(tensors, others), axis).unique()) == 1:
        return True
    prints = fingerprints(tensors.values())
    described = {name: _describe(x, number) for (name, x), number in zip(tensors.items(), prints, strict=True)}
    said = {name: (described | others)[name] for name in values}
    by_rank = [json.loads(text) for text in all_gather_text(json.dumps(said), axis)]
    for name in dict.fromkeys(name for each in by_rank for name in each):
        seen = [each.get(name, "nothing") for each in by_rank]
        if any(not _same(seen[0], other) for other in seen[1:]):
            raise ValueError(f"the ranks were given different {what}: {name} is {_by_ranks(seen, axis)}")
    return False


def _digest(tensors: Mapping[str, Tensor], others: Mapping[str, str]) -> Tensor:
    """An int64 [1] of all: what is on a device is put in one row first, launches being most of the time, and stays."""
    rows: dict[torch.device, list[Tensor]] = {}
    for x in tensors.values():
        rows.setdefault(x.device, []).append(_words(x))
    prints = {device: _weighed(torch.cat(words)) for device, words in rows.items()}
    on_host = [int(number) for device, number in prints.items() if device.type == "cpu"]
    shapes = [(name, tuple(x.shape), x.dtype) for name, x in tensors.items()]
    digest = zlib.crc32(repr((shapes, others, on_host)).encode())
    on_device = [number for device, number in prints.items() if device.type != "cpu"]
    return (sum(on_device) + digest).view(1) if on_device else torch.tensor([digest])


@contextmanager
def fail_together(what: str, axis: Axis) -> Iterator[None]:
    """What one rank raises in here, all ranks raise: the others would wait for it in their next collective.

    Raises:
        RuntimeError: another rank failed; says which, and what it raised.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    said = "ok" if error is None else f"{type(error).__name__}: {error}"
    if axis.size > 1:
        everyone = axis.ranks()
        by_rank = dict(zip(everyone, all_gather_text(said, axis), strict=True))
        failed = {rank: text for rank, text in by_rank.items() if text != "ok"}
        if failed and error is None:
            first = next(iter(failed.values()))
            raise RuntimeError(f"{name_ranks(list(failed))} could not {what}: {first}")
    if error is not None:
        raise error


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """What lists, tuples and dicts hold, each by its place: `kwargs.scale`, `images.0`."""
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(item, f"{name}.{index}")
    else:
        yield name, value


def _words_of(x: Any) -> str:
    """`repr`, without the place of an object (a cache of keys, say), which is another in each process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(x))


def _describe(x: Tensor, number: int) -> dict[str, Any]:
    values = (torch.view_as_real(x) if x.is_complex() else x).flatten().double().cpu()
    signs = torch.Generator().manual_seed(0)
    # Random projections tell how far apart two tensors are (Johnson and Lindenstrauss, 1984).
    sketch = [torch.randn(values.numel(), generator=signs, dtype=torch.double) @ values for _ in range(8)]
    return {
        "kind": f"{[*x.shape]} {str(x.dtype).removeprefix('torch.')}",
        "print": number,
        "few": not x.is_floating_point() or x.numel() <= FEW,
        "norm": values.norm().item(),
        "sketch": [each.item() for each in sketch],
        "sample": ", ".join(f"{value:.6g}" for value in values[:4].tolist()) + (", ..." if values.numel() > 4 else ""),
    }


def _same(a: Any, b: Any) -> bool:
    """Equal, or equal but for rounding."""
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return a == b
    if a["kind"] != b["kind"] or a["print"] == b["print"] or a["few"]:
        return a["kind"] == b["kind"] and a["print"] == b["print"]
    distance = math.sqrt(sum((x - y) ** 2 for x, y in zip(a["sketch"], b["sketch"], strict=True)) / len(a["sketch"]))
    return distance <= ROUNDING * a["norm"]


def _by_ranks(seen: Sequence[Any], axis: Axis) -> str:
    """`0.5 on rank 0 and 0.25 on ranks 1, 2`"""
    groups: dict[str, list[int]] = {}
    for rank, each in zip(axis.ranks(), seen, strict=True):
        if isinstance(each, dict):
            each = f"{each['kind']} ({each['sample']}; norm {each['norm']:.6g})"
        groups.setdefault(each, []).append(rank)
    return " and ".join(f"{each} on {name_ranks(on)}" for each, on in groups.items())
