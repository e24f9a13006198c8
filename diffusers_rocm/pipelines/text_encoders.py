"""The text encoders of a pipeline on the ranks that share a picture: sharded, on the first rank alone, or on each."""

import functools
import os
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from transformers import PreTrainedModel

from ..distributed.agreement import fail_together
from ..distributed.axis import Axis
from ..distributed.collectives import all_gather_int64
from ..hooks.around_call import AroundCall
from ..loaders.text_encoder import (
    empty_text_encoder,
    load_sharded_text_encoder,
    placements_of,
)
from ..loaders.whole import checkpoint_files, load_whole
from .choices import check_choices
from .first_rank import answer_of_first_rank
from .room import ROOM


def load_text_encoder(
    cls: type[PreTrainedModel],
    folder: Path,
    mode: str,
    axis: Axis,
    device: torch.device,
    dtype: torch.dtype,
    variant: str | None = None,
    beside: int = 0,
) -> tuple[PreTrainedModel, str]:
    """The text encoder in `folder` as this rank has it, on the CPU, and the mode that `"auto"` became.

    Args:
        beside: bytes that this rank is yet to load besides it, which its host has to have room for.

    Raises:
        ValueError: a mode that there is not, or a class that no plan shards; a checkpoint that cannot be read.
        RuntimeError: another rank failed.
    """
    check_choices(text_encoders=mode)
    if mode == "auto" and axis.size > 1:
        mode = _fitting(cls, folder, axis, device, dtype, variant, beside)
    if axis.size == 1 or mode == "replicate":
        with fail_together(f"load the {cls.__name__}", axis):
            return load_whole(cls, folder, dtype, variant), "replicate"
    if mode == "shard":
        model = load_sharded_text_encoder(cls, folder, axis, dtype, variant)
    else:
        with fail_together(f"load the {cls.__name__}", axis):
            first = axis.rank == 0
            model = load_whole(cls, folder, dtype, variant) if first else _shell(cls, folder, dtype)
        FirstRankEncoder(model, axis)
    for call, way_out in _OF_WHOLE_ENCODERS.items():
        setattr(model, call, functools.partial(_refuse, f"{cls.__name__} is not whole on every rank", mode, way_out))
    model.shared_by_ranks = mode
    return model, mode


# What needs all weights on each rank, and what to do in its place.
_OF_WHOLE_ENCODERS = {
    "save_pretrained": "save it from where it was read",
    "add_adapter": "load the pipeline with text_encoders='replicate'",
    "load_adapter": "load the pipeline with text_encoders='replicate'",
}


def _refuse(what: str, mode: str, way_out: str, *args: Any, **kwargs: Any) -> None:
    raise ValueError(f"this {what} (text_encoders={mode!r}): {way_out}")


def _fitting(
    cls: type[PreTrainedModel],
    folder: Path,
    axis: Axis,
    device: torch.device,
    dtype: torch.dtype,
    variant: str | None,
    beside: int,
) -> str:
    """The mode with the least traffic whose weights fit: the device of a rank, and the hosts, where they wait."""
    with fail_together(f"load the {cls.__name__}", axis):
        checkpoint_files(folder, variant)
        model = empty_text_encoder(cls, folder, dtype)
        size = sum(x.numel() for x in model.parameters()) * dtype.itemsize
        host = psutil.virtual_memory().available
        own = host if device.type == "cpu" else torch.get_device_module(device).mem_get_info(device)[1]
        try:
            placements_of(model, axis.size)
            can_be_cut = True
        except ValueError:
            can_be_cut = False
    by_rank = all_gather_int64(torch.tensor([host, own, beside]), axis)
    (host, own, _), beside = by_rank.amin(0).tolist(), by_rank[:, 2].max().item()
    on_this_host = min(int(os.environ.get("LOCAL_WORLD_SIZE", axis.size)), axis.size)
    room = ROOM * host - beside * on_this_host
    if size <= ROOM * own and size * on_this_host <= room:
        return "replicate"
    if can_be_cut and not size <= min(ROOM * own, room):
        return "shard"
    return "first-rank"


def _shell(cls: type[PreTrainedModel], folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The text encoder's config and nothing else, but for something that has a dtype and a device."""
    model = empty_text_encoder(cls, folder, dtype)
    for held in (model._modules, model._parameters, model._buffers):
        held.clear()
    model.nothing = nn.Parameter(torch.zeros((), dtype=dtype), requires_grad=False)
    return model


class FirstRankEncoder(AroundCall):
    """The first rank of the axis encodes, the others receive: embeddings are small where encoders are large."""

    def __init__(self, model: nn.Module, axis: Axis):
        super().__init__(model)
        self._axis = axis

    @torch.no_grad()
    def around(self, call: Any, args: tuple, kwargs: dict) -> Any:
        return answer_of_first_rank("encode the prompt", call, args, kwargs, self._axis)
