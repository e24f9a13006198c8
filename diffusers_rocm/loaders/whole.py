"""Whole models, of diffusers or transformers, of whose checkpoints no tensor may be missing."""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from torch import nn

from ..registration import DTYPE_ARGUMENT
from .stored_tensor import some, stored_tensors


def read_json(file: Path) -> Any:
    """Raises ValueError where it is not JSON."""
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error})") from None


def checkpoint_files(folder: Path, variant: str | None = None) -> list[Path]:
    """The safetensors files of a model of diffusers or transformers.

    Raises:
        ValueError: there are none, or not all that an index names.
    """
    of_variant = f".{variant}" if variant else ""
    for stem in ("diffusion_pytorch_model", "model"):
        index = folder / f"{stem}.safetensors.index{of_variant}.json"
        single = folder / f"{stem}{of_variant}.safetensors"
        if index.is_file():
            files: dict[Path, str] = {}  # with the first tensor of each
            try:
                where = read_json(index)["weight_map"].items()
            except (AttributeError, KeyError, TypeError):
                raise ValueError(f"{index} says of no tensor in which file it is") from None
            for tensor, name in where:
                files.setdefault(folder / name, tensor)
            for file, tensor in files.items():
                if not file.is_file():
                    raise ValueError(f"{file} is not there, which {index.name} says has {tensor}")
            return list(files)
        if single.is_file():
            return [single]
    if variant is not None:  # not every component of a pipeline has it
        return checkpoint_files(folder)
    raise ValueError(
        f"{folder} has no diffusion_pytorch_model.safetensors, nor a model.safetensors; other formats are not read"
    )


def load_whole(cls: type[nn.Module], folder: Path, dtype: torch.dtype, variant: str | None = None) -> nn.Module:
    """The model in `folder`, on the CPU; of the variant, where that component of a pipeline has it.

    Raises:
        ValueError: no safetensors, a file that was cut off, a tensor that is missing or has another shape.
    """
    for file in checkpoint_files(folder, variant):
        stored_tensors(file)  # says what a file that was cut off lacks
    dtype_argument = DTYPE_ARGUMENT if issubclass(cls, ModelMixin) else "dtype"
    model, found = cls.from_pretrained(
        folder,
        variant=variant_in(folder, variant),
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **{dtype_argument: dtype},
    )
    if found["missing_keys"]:
        raise ValueError(f"the checkpoint of this {cls.__name__} lacks {some(sorted(found['missing_keys']))}")
    if found["mismatched_keys"]:
        name, stored, wanted = sorted(found["mismatched_keys"])[0]
        raise ValueError(f"{name} is {[*stored]} in the checkpoint, and {[*wanted]} in this {cls.__name__}")
    return model


def variant_in(folder: Path, variant: str | None) -> str | None:
    """The variant, if the folder has files of it."""
    return variant if variant is not None and any(folder.glob(f"*.{variant}.*")) else None
