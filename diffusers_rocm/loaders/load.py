"""Read a checkpoint straight into a sharded model: each rank reads the slices that it keeps, and no more.

diffusers finds the files and builds the model, without weights. What it would then read whole is read here: the model
is sharded first, while it has no weights, and each parameter is filled with the part that its shard says.
"""

import functools
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ..distributed.axis import Axis
from ..distributed.sharding import Shard
from ..hooks.tensor_parallel import resolve, shard_modules
from ..models.plans import get_tensor_parallel_plan


_tp: ContextVar[Axis | None] = ContextVar(
    "the axis over which the model that is being loaded is sharded", default=None
)


@contextmanager
def sharded_loading(tp: Axis) -> Iterator[None]:
    """What `from_pretrained` loads in here is sharded over this axis, if it has several ranks."""
    token = _tp.set(tp if tp.size > 1 else None)
    try:
        yield
    finally:
        _tp.reset(token)


class CheckpointFiles:
    """The tensors of some safetensors files, of which slices are read.

    A file is opened for each tensor: what is mapped of it counts as the process's memory until it is closed.

    Raises:
        ValueError: a file that is not safetensors, or lacks its end; names the tensors that it lacks.
    """

    def __init__(self, files: Sequence[str | os.PathLike]):
        self._file: dict[str, str | os.PathLike] = {}
        for file in files:
            try:
                with safe_open(file, framework="pt") as opened:
                    self._file |= dict.fromkeys(opened.keys(), file)
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{file} cannot be read as safetensors ({error}){_beyond_the_end(file)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def read(
        self, name: str, into: torch.Tensor, shape: torch.Size, runs: Sequence[tuple[int, int]], dim: int
    ) -> None:
        """Fill `into` with the runs `(start, length)` along `dim` of a tensor of that shape.

        Raises:
            ValueError: the tensor has another shape.
        """
        with safe_open(self._file[name], framework="pt") as opened:
            tensor = opened.get_slice(name)
            if tuple(tensor.get_shape()) != tuple(shape):
                raise ValueError(f"{name} is {tensor.get_shape()} in {self._file[name]}, and {[*shape]} in the model")
            if not shape:
                into.copy_(opened.get_tensor(name))
                return
            offset = 0
            for start, length in runs:
                at = (slice(None),) * dim + (slice(start, start + length),)
                into.narrow(dim, offset, length).copy_(tensor[at])
                offset += length


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
    return f"; the file ends before the end of {_some(cut)}" if cut else ""


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def wrap_load_state_dict(original: Callable) -> Callable:
    """Of a checkpoint in one file, diffusers wants all tensors before it looks at one: the names will do."""

    @functools.wraps(original)
    def load_state_dict(checkpoint_file, *args, **kwargs):
        if _tp.get() is None or not str(checkpoint_file).endswith(".safetensors"):
            return original(checkpoint_file, *args, **kwargs)
        return dict.fromkeys(CheckpointFiles([checkpoint_file]))

    return load_state_dict


def wrap_load_pretrained_model(original: classmethod) -> classmethod:
    """diffusers' own, unless the model is to be sharded."""

    @functools.wraps(original.__func__)
    def _load_pretrained_model(cls, model, state_dict, resolved_model_file, name_or_path, loaded_keys, **kwargs):
        tp = _tp.get()
        if tp is None or kwargs.get("hf_quantizer") is not None:
            return original.__func__(cls, model, state_dict, resolved_model_file, name_or_path, loaded_keys, **kwargs)
        return _load_sharded(model, CheckpointFiles(resolved_model_file), tp, **kwargs)

    return classmethod(_load_pretrained_model)


@torch.no_grad()
def _load_sharded(
    model: nn.Module,
    checkpoint: CheckpointFiles,
    tp: Axis,
    dtype: torch.dtype | None = None,
    keep_in_fp32_modules: Sequence[str] | None = None,
    device_map: dict[str, Any] | None = None,
    low_cpu_mem_usage: bool = True,
    **kwargs: Any,
) -> tuple[nn.Module, list[str], list[str], list, None, list[str]]:
    """In place of diffusers' `_load_pretrained_model`, whose answer it gives.

    Raises:
        ValueError: options that go with no sharded model; a tensor that the checkpoint lacks, or has in another shape.
    """
    name = type(model).__name__
    if not low_cpu_mem_usage:
        raise ValueError("low_cpu_mem_usage=False builds the whole model on every rank; leave it out")
    if device_map is not None and set(device_map) != {""}:
        raise ValueError(f"a {name} that is sharded over ranks is on one device each: device_map={{'': device}}")
    device = torch.device((device_map or {"": "cpu"})[""])
    shard_modules(resolve(model, get_tensor_parallel_plan(type(model)), tp.size), tp)
    wanted = dict(_destinations(model))
    missing = [key for key in wanted if key not in set(checkpoint)]
    if missing:
        raise ValueError(f"the checkpoint of this {name} lacks {_some(missing)}")
    for key, (module, attribute) in wanted.items():
        was = getattr(module, attribute)
        sharding = getattr(module, "sharding", None)
        shard = sharding.shards.get(attribute) if sharding is not None else None
        if was is None:  # a bias that the first rank has
            continue
        kept = dtype if dtype is not None and was.is_floating_point() else was.dtype
        if keep_in_fp32_modules and was.is_floating_point() and set(keep_in_fp32_modules) & set(key.split(".")):
            kept = torch.float32
        tensor = torch.empty(was.shape, dtype=kept, device=device)
        shape = was.shape if shard is None else sharding.shapes[attribute]
        checkpoint.read(key, tensor, shape, *_place(shard, shape, tp))
        if isinstance(was, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=was.requires_grad)
        setattr(module, attribute, tensor)
    unexpected = [key for key in checkpoint if key not in wanted]
    for pattern in type(model)._keys_to_ignore_on_load_unexpected or ():
        unexpected = [key for key in unexpected if re.search(pattern, key) is None]
    return model, [], unexpected, [], None, []


def _place(shard: Shard | None, shape: torch.Size, tp: Axis) -> tuple[list[tuple[int, int]], int]:
    """The runs, and the dim along which they are, that this rank has of a tensor."""
    if shard is None or shard.dim is None:
        return [(0, shape[0] if shape else 0)], 0
    return shard.runs(tp.rank, tp.size), shard.dim


def _destinations(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    """Name in a checkpoint -> the module and its attribute."""
    for path, module in model.named_modules():
        sharding = getattr(module, "sharding", None)
        names = dict.fromkeys(name for name, value in module._parameters.items() if value is not None)
        names |= dict.fromkeys(sharding.shards if sharding is not None else ())
        names |= dict.fromkeys(name for name in module._buffers if name not in module._non_persistent_buffers_set)
        for name in names:
            yield f"{path}.{name}" if path else name, (module, name)
