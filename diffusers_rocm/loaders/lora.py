"""LoRA adapters (Hu et al., 2021) of a parallel model: loaded whole, on all ranks, and cut where the model is.

PEFT puts an adapter around a Linear: `base_layer(x) + B(A(x))`. While diffusers and PEFT add one, the model shows them
the modules that it was made of, and its other adapters are whole; afterwards A and B are sharded, by the style of what
they adapt. So are they where the adapter was there before the model was parallel.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from diffusers.utils import logging
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..distributed.agreement import fail_together
from ..distributed.axis import Axis
from ..distributed.collectives import broadcast_from_first
from ..distributed.quantized import is_quantized
from ..hooks.modulation import StepModulation
from ..hooks.tensor_parallel import base_layer, check_can_be_whole, sharded_modules, unshard_modules
from ..hooks.weight_agreement import first_difference
from .load import shard_additions


logger = logging.get_logger(__name__)


def _adapted(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that PEFT has put around others, with their paths."""
    return ((path, module) for path, module in list(model.named_modules()) if base_layer(module) is not module)


def _world(model: nn.Module) -> Axis | None:
    """The ranks that share a parallel model."""
    parallelism = getattr(model, "parallelism", None)
    return parallelism.axes.world if parallelism is not None and parallelism.axes.world.size > 1 else None


def settle_lora_biases(model: nn.Module) -> None:
    """Tell PEFT on which ranks there is a bias to merge B's into: that of a row-parallel Linear is on the first."""
    for _, layer in _adapted(model):
        base = layer.base_layer
        sharding = getattr(base, "sharding", None)
        elsewhere = sharding is not None and "bias" in sharding.shards and base.bias is None
        for name, b in getattr(layer, "lora_B", {}).items():
            layer.lora_bias[name] = b.bias is not None and not elsewhere


def _unshard_adapters(model: nn.Module) -> None:
    """Raises ValueError, before anything changes, where adapters were quantised on each rank by itself."""
    check_can_be_whole(model, adapters_only=True)
    for _, layer in _adapted(model):
        for name, part in layer.named_children():
            if name != "base_layer":
                unshard_modules(part)


def _shard_adapters(model: nn.Module) -> None:
    shard_additions(model)
    settle_lora_biases(model)


@contextmanager
def _shown_whole(model: nn.Module) -> Iterator[None]:
    """Sharded modules have the classes and sizes that they had, by which PEFT makes its layers; not the weights."""
    now = []
    for module in sharded_modules(model):
        for name, value in module.sharding.attributes.items():
            now.append((module, name, getattr(module, name)))
            setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in now:
            setattr(module, name, value)


_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
)  # fmt: skip


@contextmanager
def _hooks_stay_at_their_paths(model: nn.Module) -> Iterator[None]:
    """Where PEFT puts a layer around a module, or takes it off again, what hung on the one hangs on the other."""
    ours = getattr(getattr(model, "parallelism", None), "hooks", [])
    steps = [hook for hook in ours if isinstance(hook, StepModulation)]
    handles = [hook for hook in ours if isinstance(hook, RemovableHandle)]
    handles += [handle for step in steps for handle in step.handles]
    held = {id(handle.hooks_dict_ref()) for handle in handles}
    before = {
        path: module
        for path, module in model.named_modules()
        if held & {id(module._forward_hooks), id(module._forward_pre_hooks)}
    }
    try:
        yield
    finally:
        for path, was in before.items():
            module = model.get_submodule(path)
            if module is was:
                continue
            for name in _HOOKS:  # the dicts themselves: handles refer to them
                vars(module)[name], vars(was)[name] = vars(was)[name], vars(module)[name]
            for step in steps:
                if step.source is was:
                    step.follow(module)


@torch.no_grad()
def _take_those_of_the_first_rank(model: nn.Module, world: Axis) -> None:
    """The adapters, all of them whole: random ones differ."""
    adapters = {
        f"{path}.{name}": parameter
        for path, layer in _adapted(model)
        for name, parameter in layer.named_parameters()
        if not name.startswith("base_layer.")
    }
    difference = first_difference(model, world, adapters)
    if difference is not None:
        if world.rank == 0:
            logger.warning(f"the ranks' adapters differ, first in {difference}: all ranks take those of the first")
        for parameter in adapters.values():
            parameter.copy_(broadcast_from_first(parameter, world))


_sharded: ContextVar[nn.Module | None] = ContextVar(
    "the sharded model to which an adapter is being added", default=None
)


def _refuse(config: Any) -> None:
    """Of what is made of slices only plain LoRA is right.

    Raises:
        ValueError: names the kind of adapter.
    """
    model, kind = _sharded.get(), getattr(config, "peft_type", None)
    if model is None or kind is None:  # which is not a config
        return
    kind = kind.value
    if kind == "LORA":
        if config.use_dora:
            kind = "DoRA"  # scales by the norms of whole rows
        elif config.init_lora_weights not in (True, False, "gaussian", "orthogonal"):
            kind = f"LoRA with init_lora_weights={config.init_lora_weights!r}"
        elif config.bias != "none" or config.modules_to_save:
            kind = f"LoRA with bias={config.bias!r}, modules_to_save={config.modules_to_save}"
        else:
            return
    raise ValueError(
        f"{kind} cannot be added to a {type(model).__name__} that is sharded, only plain LoRA can: call "
        "disable_parallelism(), load it, call fuse_lora() and unload_lora_weights(), then enable parallelism"
    )


def wrap_create_config(original: Callable) -> Callable:
    """`load_lora_adapter` calls it once it has read an adapter, and before it changes a model."""

    @functools.wraps(original)
    def create_config(*args, **kwargs):
        config = original(*args, **kwargs)
        _refuse(config)
        return config

    return create_config


def wrap_add_adapter(original: Callable) -> Callable:
    """`add_adapter` and `load_lora_adapter`: all ranks call it, and have the adapter, or none has."""

    @functools.wraps(original)
    def add(self, *args, **kwargs):
        world = _world(self)
        if world is None:
            return original(self, *args, **kwargs)
        before = set(getattr(self, "peft_config", ()))
        _unshard_adapters(self)
        token = _sharded.set(self if next(sharded_modules(self), None) is not None else None)
        try:
            with fail_together("add an adapter", world), _hooks_stay_at_their_paths(self), _shown_whole(self):
                _refuse(args[0] if args else kwargs.get("adapter_config"))
                result = original(self, *args, **kwargs)
            _take_those_of_the_first_rank(self, world)
            _shard_adapters(self)
        except Exception:
            if before:
                self.delete_adapters(list(set(getattr(self, "peft_config", ())) - before))
            else:
                self.unload_lora()
            _shard_adapters(self)
            raise
        finally:
            _sharded.reset(token)
        return result

    return add


def wrap_save_lora_adapter(original: Callable) -> Callable:
    @functools.wraps(original)
    def save_lora_adapter(self, save_directory, adapter_name="default", upcast_before_saving=False, *args, **kwargs):
        """Every rank must call it; global rank 0 writes the whole adapter."""
        arguments = (save_directory, adapter_name, upcast_before_saving, *args)
        world = _world(self)
        if world is None:
            return original(self, *arguments, **kwargs)
        if upcast_before_saving:
            raise ValueError(
                f"upcast_before_saving makes the whole {type(self).__name__} float32, on the rank that writes: save "
                "a parallel one without it"
            )
        _unshard_adapters(self)
        try:
            with fail_together("save an adapter", world):
                if dist.get_rank() == 0:
                    original(self, *arguments, **kwargs)
        finally:
            _shard_adapters(self)

    return save_lora_adapter


def wrap_fuse_lora(original: Callable) -> Callable:
    """Each rank merges its slices, which needs no other, but all of them do or none."""

    @functools.wraps(original)
    def fuse_lora(self, *args, **kwargs):
        world = _world(self)
        if world is None:
            return original(self, *args, **kwargs)
        quantized = [m for m in sharded_modules(self) if is_quantized(getattr(m, "weight", None))]
        if quantized:
            raise ValueError(
                f"the weights of this {type(self).__name__} are quantised shards, which fusing would round again, "
                "each rank by itself: leave the adapters unfused, or fuse them before the model is quantised"
            )
        with fail_together("fuse adapters", world):  # safe_fusing finds a NaN on the rank that has it
            return original(self, *args, **kwargs)

    return fuse_lora


def wrap_unload_lora(original: Callable) -> Callable:
    """The hooks of a split model outlive the layers that PEFT takes off."""

    @functools.wraps(original)
    def unload_lora(self):
        with _hooks_stay_at_their_paths(self):
            return original(self)

    return unload_lora


def wrap_calculate_module_shape(original: staticmethod) -> staticmethod:
    """By it a FLUX pipeline finds the Linears that an adapter is too large for, and makes them larger."""

    @functools.wraps(original.__func__)
    def _calculate_module_shape(model, base_module=None, base_weight_param_name=None):
        module = base_module
        if module is None:
            module = model.get_submodule(base_weight_param_name.removesuffix(".weight"))
        sharding = getattr(module, "sharding", None)
        if sharding is not None and "weight" in sharding.shapes:
            return sharding.shapes["weight"]
        return original.__func__(model, base_module, base_weight_param_name)

    return staticmethod(_calculate_module_shape)


def check_adapter_is_for_whole(component: Any, name: str, state_dict: Collection[str]) -> None:
    """Raises ValueError where an adapter is for a text encoder that is not whole on every rank."""
    mode = getattr(component, "shared_by_ranks", None)
    if mode is not None and any(key.startswith(f"{name}.") for key in state_dict):
        raise ValueError(
            f"this adapter is for the {name} too, which text_encoders={mode!r} leaves whole on no rank, or on the "
            f"first alone: load the pipeline with text_encoders={{{name!r}: 'replicate'}}"
        )


def wrap_load_lora_into_text_encoder(original: Callable) -> Callable:
    """For pipelines that are parallel no more, whose text encoders are shared still."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_lora_into_text_encoder(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        name = given.get("prefix") or given.get("text_encoder_name", "text_encoder")
        check_adapter_is_for_whole(given["text_encoder"], name, given["state_dict"])
        return original(*args, **kwargs)

    return load_lora_into_text_encoder
