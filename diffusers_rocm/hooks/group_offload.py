"""diffusers' group offloading of a model that is sharded, or made whole again: its groups hold on to parameters."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from diffusers.hooks.group_offloading import (
    _get_top_level_group_offload_hook,
    _maybe_remove_and_reapply_group_offloading,
)
from torch import Tensor, nn

from .disk_offload import is_on_disk


def check_weights_are_here(model: nn.Module, instead: str) -> None:
    """Raises ValueError where the weights are in files, and what the model holds has no values."""
    hook = _get_top_level_group_offload_hook(model)
    if is_on_disk(model) or hook is not None and hook.config.offload_to_disk_path is not None:
        raise ValueError(f"the weights of this {type(model).__name__} are offloaded to disk: {instead}")


def regroup(model: nn.Module) -> None:
    """Group anew the parameters of a model that is offloaded and has others now."""
    _maybe_remove_and_reapply_group_offloading(model)


def is_offloaded(module: nn.Module) -> bool:
    """Are this module's own weights, and those in it, brought for its forward alone?"""
    registry = vars(module).get("_diffusers_hook")
    return registry is not None and registry.get_hook("group_offloading") is not None


def wrap_apply_group_offloading(original: Callable) -> Callable:
    """Each rank writes its weights into a folder of its own, below the one that is given."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def apply_group_offloading(*args, **kwargs):
        given = signature.bind(*args, **kwargs)
        folder = given.arguments.get("offload_to_disk_path")
        if folder is not None and dist.is_initialized() and dist.get_world_size() > 1:
            own = f"rank{dist.get_rank()}"
            given.arguments["offload_to_disk_path"] = folder if Path(folder).name == own else str(Path(folder, own))
        return original(*given.args, **given.kwargs)

    return apply_group_offloading


def wrap_to_cpu(original: staticmethod) -> staticmethod:
    """Of diffusers' `ModuleGroup`: what it keeps on the host of a parameter that it brings to the device and back.

    Of a quantised parameter that is on the host already, `cpu()` is the parameter itself, which then leaves.
    """

    @functools.wraps(original.__func__)
    def to_cpu(tensor: Tensor, low_cpu_mem_usage: bool) -> Tensor:
        kept = original.__func__(tensor, low_cpu_mem_usage)
        return kept.detach() if kept is tensor else kept

    return staticmethod(to_cpu)
