"""Tensors that stay in their safetensors file until something of them is read."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


# https://huggingface.co/docs/safetensors, "Format"
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class _Rows:
    """The rows from `start` to `stop` of a tensor in a file; None for one without dims."""

    file: str | os.PathLike
    name: str
    start: int
    stop: int | None

    def __len__(self) -> int:
        return (self.stop or 0) - self.start

    def narrow(self, start: int, stop: int) -> "_Rows":
        """Those of these rows, counted from the first of them."""
        return _Rows(self.file, self.name, self.start + max(start, 0), self.start + min(stop, len(self)))

    def read(self, into: Tensor, dim: int, start: int, stop: int) -> None:
        """Fill `into` with the elements from `start` to `stop` along a later dim; with all for dim 0."""
        # Opened for each: what is mapped of a file counts as the process's memory until it is closed.
        with safe_open(self.file, framework="pt") as opened:
            if self.stop is None:
                into.copy_(opened.get_tensor(self.name))
                return
            at = [slice(self.start, self.stop)] + [slice(None)] * dim
            if dim:
                at[dim] = slice(start, stop)
            into.copy_(opened.get_slice(self.name)[tuple(at)])


class StoredTensor(Tensor):
    """A tensor on disk, whose rows can be taken and joined without reading them.

    What converts a checkpoint to diffusers' names mostly splits and joins along dim 0, and so reads nothing; any other
    operation reads what it needs.
    """

    rows: tuple[_Rows, ...]

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, rows: tuple[_Rows, ...]):
        self = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device="cpu")
        self.rows = rows
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self) -> str:
        return f"StoredTensor({[*self.shape]}, {self.dtype}, {', '.join(rows.name for rows in self.rows)})"

    @classmethod
    def __torch_dispatch__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        handled = _HANDLED.get(func)
        if handled is not None:
            result = handled(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        args, kwargs = tree_map_only(StoredTensor, StoredTensor.load, (args, kwargs or {}))
        return func(*args, **kwargs)

    def load(self) -> Tensor:
        """All of it, on the CPU."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        self.read(whole, 0, [(0, self.shape[0] if self.shape else 0)])
        return whole

    def take(self, start: int, stop: int) -> "StoredTensor":
        """The rows from `start` to `stop`."""
        found, before = [], 0
        for rows in self.rows:
            if before < stop and start < before + len(rows):
                found.append(rows.narrow(start - before, stop - before))
            before += len(rows)
        return StoredTensor((stop - start, *self.shape[1:]), self.dtype, tuple(found))

    def read(self, into: Tensor, dim: int, runs: Sequence[tuple[int, int]]) -> None:
        """Fill `into`, of any device and dtype, with the runs `(start, length)` along `dim`, one after another."""
        if not self.shape:
            self.rows[0].read(into, 0, 0, 0)
            return
        offset = 0
        for start, length in runs:
            part, row = into.narrow(dim, offset, length), 0
            for rows in (self.take(start, start + length) if dim == 0 else self).rows:
                rows.read(part.narrow(0, row, len(rows)), dim, start, start + length)
                row += len(rows)
            offset += length


def _slice(x: StoredTensor, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> Any:
    if dim != 0 or step != 1:
        return NotImplemented
    start, stop, _ = slice(start, stop).indices(x.shape[0])
    return x.take(start, max(start, stop))


def _split(x: StoredTensor, size: int, dim: int = 0) -> Any:
    sizes = [min(size, x.shape[0] - start) for start in range(0, x.shape[0], size)]
    return _split_with_sizes(x, sizes, dim)


def _split_with_sizes(x: StoredTensor, sizes: Sequence[int], dim: int = 0) -> Any:
    if dim != 0:
        return NotImplemented
    stops = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [x.take(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    first = tensors[0]
    alike = all(isinstance(x, StoredTensor) and x.dtype == first.dtype for x in tensors)
    if dim != 0 or not alike or any(x.shape[1:] != first.shape[1:] for x in tensors):
        return NotImplemented
    rows = tuple(rows for x in tensors for rows in x.rows)
    return StoredTensor((sum(x.shape[0] for x in tensors), *first.shape[1:]), first.dtype, rows)


def _same(x: StoredTensor, **kwargs: Any) -> Any:
    return StoredTensor(x.shape, x.dtype, x.rows)


_aten = torch.ops.aten
_HANDLED: dict[Callable, Callable] = {
    _aten.slice.Tensor: _slice,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split_with_sizes,
    _aten.cat.default: _cat,
    _aten.clone.default: _same,
    _aten.detach.default: _same,
    _aten.alias.default: _same,
}


def stored_tensors(file: str | os.PathLike) -> dict[str, Tensor]:
    """All tensors of a safetensors file, by name; nothing but the file's index is read.

    Raises:
        ValueError: a file that is not safetensors, or lacks its end; names the tensors that it lacks.
    """
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():
                entry = opened.get_slice(name)
                shape = entry.get_shape()
                rows = _Rows(file, name, 0, shape[0] if shape else None)
                tensors[name] = StoredTensor(shape, _BY_NAME[entry.get_dtype()], (rows,))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read as safetensors ({error}){_beyond_the_end(file)}") from None
    except KeyError as error:
        raise ValueError(f"{file} holds tensors of a type that torch lacks: {error}") from None
    return tensors


def checkpoint_entries(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """What a checkpoint of the model holds: its name, the module and the attribute; of a sharded one, all ranks'."""
    for path, module in model.named_modules():
        names = [name for name in module._parameters if module._parameters[name] is not None]
        names += [name for name in getattr(getattr(module, "sharding", None), "shards", ()) if name not in names]
        names += [name for name in module._buffers if name not in module._non_persistent_buffers_set]
        for name in names:
            yield f"{path}.{name}" if path else name, module, name


def some(names: Sequence[str]) -> str:
    """The first of them."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _beyond_the_end(file: str | os.PathLike) -> str:
    """Which tensors a file says that it has, and has not."""
    try:
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            index = json.loads(opened.read(length))
        ends = {name: each["data_offsets"][1] for name, each in index.items() if name != "__metadata__"}
        cut = [name for name, end in ends.items() if 8 + length + end > Path(file).stat().st_size]
    except (OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError):
        return ""
    return f"; the file ends before the end of {some(cut)}" if cut else ""
