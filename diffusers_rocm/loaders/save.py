"""Write a sharded model as the full checkpoint that a single process would have written.

safetensors' own `save_file` wants all tensors at once. Its file format is an index followed by the tensors' bytes, so
the index is written first and each tensor when it has been gathered: the writer never holds more than one.
"""

import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from diffusers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFETENSORS_WEIGHTS_NAME, _add_variant
from huggingface_hub import split_state_dict_into_shards_factory
from torch import nn

from ..hooks.tensor_parallel import gather_parameter
from .stored_tensor import DTYPES, checkpoint_entries


class _Entry:
    """One tensor of the full checkpoint: its name, shape and dtype, and how to get it."""

    def __init__(self, name: str, module: nn.Module, attribute: str):
        self.name, self.module, self.attribute = name, module, attribute
        tensor = getattr(module, attribute)
        sharding = getattr(module, "sharding", None)
        self.sharded = sharding is not None and attribute in sharding.shards
        self.shape = tuple(sharding.shapes[attribute] if self.sharded else tensor.shape)
        # A row-parallel bias is absent on all ranks but the first; it has the dtype of its weight.
        self.dtype = module.weight.dtype if tensor is None else tensor.dtype
        self.nbytes = torch.Size(self.shape).numel() * self.dtype.itemsize

    def get(self, assemble: bool) -> torch.Tensor | None:
        if self.sharded:
            return gather_parameter(self.module, self.attribute, assemble)
        return getattr(self.module, self.attribute).detach() if assemble else None


def _header(entries: list[_Entry]) -> bytes:
    index: dict = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        index[entry.name] = {
            "dtype": DTYPES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    text = json.dumps(index).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class _Folder:
    """The files that one rank writes. The first error is kept and ends the writing, but not the gathering: every
    rank is needed for that, so a full disk must not leave the others waiting."""

    def __init__(self, path: Path, active: bool):
        self.path, self.active = path, active
        self.error: Exception | None = None
        self._file: BinaryIO | None = None
        self._written: list[Path] = []

    def _attempt(self, action: Callable[[], Any]) -> None:
        if self.active and self.error is None:
            try:
                action()
            except Exception as error:
                self.error = error

    def prepare(self, model: nn.Module) -> None:
        self._attempt(lambda: self.path.mkdir(parents=True, exist_ok=True))
        self._attempt(lambda: model.save_config(self.path))

    def begin(self, name: str, header: bytes) -> None:
        def action():
            self._written.append(self.path / name)
            self._file = open(self._partial(self._written[-1]), "wb")
            self._file.write(header)

        self._attempt(action)

    def write(self, tensor: torch.Tensor | None) -> None:
        self._attempt(lambda: self._file.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data))

    def end(self) -> None:
        self._attempt(lambda: self._file.close())

    def commit(self, stem: str, index: tuple[str, dict] | None) -> None:
        """Every file is complete: give them their names, and drop what an earlier save left under this one."""

        def action():
            stale = re.compile(re.escape(stem) + r"(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
            for old in self.path.iterdir():
                if stale.fullmatch(old.name):
                    old.unlink()
            for file in self._written:
                self._partial(file).rename(file)
            if index is not None:
                (self.path / index[0]).write_text(json.dumps(index[1], indent=2, sort_keys=True) + "\n")

        self._attempt(action)
        if self.error is not None:
            if self._file is not None:
                with suppress(OSError):  # once more, of what is left in its buffer
                    self._file.close()
            for file in self._written:
                self._partial(file).unlink(missing_ok=True)

    @staticmethod
    def _partial(file: Path) -> Path:
        return file.with_name(file.name + ".partial")


def save_checkpoint(
    model: nn.Module,
    save_directory: str | os.PathLike,
    is_main_process: bool = True,
    save_function: Callable | None = None,
    safe_serialization: bool = True,
    variant: str | None = None,
    max_shard_size: int | str = "10GB",
    push_to_hub: bool = False,
    use_flashpack: bool = False,
) -> None:
    """`save_pretrained` of a parallel model. Every rank must call it; global rank 0 writes and the others wait.

    Raises:
        ValueError: options that a sharded model cannot be saved with.
        OSError: rank 0 could not write; raised on every rank, the reason on rank 0. An earlier checkpoint in the
            folder is then untouched.
    """
    if not safe_serialization or save_function is not None or push_to_hub or use_flashpack:
        raise ValueError(
            "a parallel model is saved as safetensors in a local folder: save_function, safe_serialization=False, "
            "push_to_hub and use_flashpack are not supported; call disable_parallelism() first to use them"
        )
    folder = _Folder(Path(save_directory), active=dist.get_rank() == 0)
    _save(model, folder, variant, max_shard_size)
    device = model.parallelism.axes.world.device
    failed = torch.tensor([folder.error is not None], dtype=torch.int32, device=device)
    dist.broadcast(failed, src=0)
    if folder.error is not None:
        raise folder.error
    if failed.item():
        raise OSError(f"rank 0 could not save the model to {save_directory}; it has the error")


def _save(model: nn.Module, folder: _Folder, variant: str | None, max_shard_size: int | str) -> None:
    entries = {each[0]: _Entry(*each) for each in checkpoint_entries(model)}
    stem = _add_variant(SAFETENSORS_WEIGHTS_NAME, variant).removesuffix(".safetensors")
    split = split_state_dict_into_shards_factory(
        entries,
        get_storage_size=lambda entry: entry.nbytes,
        filename_pattern=stem + "{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    # On every rank, before they part: what cannot be written is an error on all of them.
    headers = {file: _header([entries[name] for name in names]) for file, names in split.filename_to_tensors.items()}
    # Groups along the other axes hold the same weights and have nothing to do.
    if model.parallelism.axes.tp.first != 0:
        return
    folder.prepare(model)
    for filename, header in headers.items():
        folder.begin(filename, header)
        for name in split.filename_to_tensors[filename]:
            folder.write(entries[name].get(assemble=folder.active))
        folder.end()
    index = None
    if split.is_sharded:
        content = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        index = (_add_variant(SAFE_WEIGHTS_INDEX_NAME, variant), content)
    folder.commit(stem, index)
