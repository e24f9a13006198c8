"""Whole models, of diffusers or transformers, of whose checkpoints no tensor may be missing."""

from pathlib import Path

import torch
from diffusers import ModelMixin
from torch import nn

from ..registration import DTYPE_ARGUMENT
from .stored_tensor import some, stored_tensors


def load_whole(cls: type[nn.Module], folder: Path, dtype: torch.dtype, variant: str | None = None) -> nn.Module:
    """The model in `folder`, on the CPU; of the variant, where that component of a pipeline has it.

    Raises:
        ValueError: no safetensors, a file that was cut off, a tensor that is missing or has another shape.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no safetensors; weights of other formats are not read")
    for file in files:
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
