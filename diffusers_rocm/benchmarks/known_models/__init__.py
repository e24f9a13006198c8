"""Transformers of their real size, without their weights: what they are built of, and what a step feeds them."""

from collections.abc import Mapping
from typing import Any

import diffusers
import torch
from accelerate import init_empty_weights
from diffusers import ModelMixin
from torch import Tensor, nn

from ...distributed.axis import Axis
from ...hooks.tensor_parallel import resolve, shard_modules
from ...models.plans import get_tensor_parallel_plan
from .known_model import KnownModel, Size
from .packed_pictures import PACKED_PICTURES
from .pictures import PICTURES
from .sounds import SOUNDS
from .videos import VIDEOS
from .videos_in_one_row import VIDEOS_IN_ONE_ROW
from .videos_with_more import VIDEOS_WITH_MORE


KNOWN_MODELS = PACKED_PICTURES | PICTURES | VIDEOS | VIDEOS_WITH_MORE | VIDEOS_IN_ONE_ROW | SOUNDS


def cannot_be_had(name: str, config: Mapping[str, Any], error: Exception) -> ValueError:
    """A class that fails with the config of somebody's folder."""
    shown = ", ".join(f"{key}={value!r}" for key, value in config.items() if not key.startswith("_"))
    why = str(error).strip().partition("\n")[0]
    return ValueError(f"{name} cannot be had with {shown}: {type(error).__name__}{why and f': {why}'}")


def made(known: KnownModel, config: Mapping[str, Any]) -> ModelMixin:
    """The model without its weights. Raises ValueError where its class takes no such config, or makes no blocks."""
    try:
        numbers = {name: value for name, value in config.items() if isinstance(value, int)}
        if any(name.startswith("num_") and value < 0 for name, value in numbers.items()):
            raise ValueError("fewer than none")
        if any("heads" in name and value == 0 for name, value in numbers.items()):
            raise ValueError("no heads are left")
        with init_empty_weights(include_buffers=False):
            model = getattr(diffusers, known.cls)(**{**known.config, **config}).eval()
        if count_blocks(model) == 0:
            raise ValueError("no blocks are left")
        return model
    except (TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        raise cannot_be_had(known.cls, config, error) from error


_NORMS_OF_ATTENTION = ("norm_q", "norm_k", "norm_added_q", "norm_added_k", "q_norm", "k_norm")


@torch.no_grad()
def build(
    known: KnownModel,
    config: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    tp: Axis | None = None,
) -> ModelMixin:
    """The model with random weights that are equal on every rank, made on the device itself.

    Weights keep the scale of what goes through them, and queries find some keys and not others: where attention is
    nearly even, its output is nearly nothing, and nobody sees that half of the keys are missing.

    Args:
        config: what is to differ from the published model.
        tp: each rank keeps its part of every weight, so that the device has room for one whole weight, not for all.

    Raises:
        ValueError: a config that its class does not take, or that cannot be sharded so.
    """
    model = made(known, config)
    kept = kept_in_float32(model)
    if tp is not None and tp.size > 1:
        shard_modules(resolve(model, get_tensor_parallel_plan(type(model)), tp.size), tp)
    generator = torch.Generator(device=device).manual_seed(0)
    for path, module in model.named_modules():
        sharding = getattr(module, "sharding", None)
        for name, parameter in module._parameters.items():
            shard = None if sharding is None else sharding.shards.get(name)
            if parameter is None and shard is None:
                continue
            kept_dtype = torch.float32 if f"{path}.{name}".removeprefix(".") in kept else dtype
            whole = parameter.shape if shard is None else sharding.shapes[name]
            x = torch.empty(whole, dtype=kept_dtype, device=device)
            if x.ndim > 1:
                x.normal_(0, x[0].numel() ** -0.5, generator=generator)
            elif "norm" in path and name in ("weight", "gamma"):
                x.fill_(2 if path.endswith(_NORMS_OF_ATTENTION) else 1)
            else:
                x.normal_(0, 0.01, generator=generator)
            if shard is not None:
                x = shard.take(x, tp.rank, tp.size)
            module._parameters[name] = None if x is None else nn.Parameter(x, requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                stored = buffer.is_floating_point() and name not in module._non_persistent_buffers_set
                module._buffers[name] = buffer.to(device, dtype if stored else None)
    return model


def kept_in_float32(model: ModelMixin) -> set[str]:
    """Names of the parameters that `from_pretrained` leaves in float32, whatever dtype it is asked for."""
    parts = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return {name for name, _ in model.named_parameters() if parts & set(name.split("."))}


def count_blocks(model: ModelMixin) -> int:
    """How many there are one after another: classes name theirs in one of two places, in both, or in neither."""
    names = {*(model._repeated_blocks or ()), *(model._no_split_modules or ())}
    if not names:
        return sum(len(blocks) for blocks in model.children() if isinstance(blocks, nn.ModuleList))
    return sum(type(module).__name__ in names for module in model.modules())


def inputs(known: KnownModel, size: Size, model: ModelMixin, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments of a forward, equal on every rank."""
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    return {**known.inputs(randn, size, model.config), "return_dict": False}
