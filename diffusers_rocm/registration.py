"""The one place that touches diffusers' classes, and the one place that knows its versions.

`register()` runs on import. Every touch is an entry of `_touches()`, which says what it is for and which versions need
it; `unregister()` puts back the very objects that were there.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import diffusers
import torch.distributed
from packaging.version import Version


@dataclass
class _BareTensorParallelConfig:
    tp_degree: int = 1
    mesh: Any = None


# diffusers has a TensorParallelConfig since 0.40; before that ours stands alone.
TensorParallelConfigBase: type = getattr(diffusers, "TensorParallelConfig", _BareTensorParallelConfig)

# from_pretrained's name for the dtype: renamed in 0.42, where the old one warns.
DTYPE_ARGUMENT = "dtype" if Version(diffusers.__version__) >= Version("0.42") else "torch_dtype"

_ABSENT = object()
_lock = threading.RLock()


@dataclass
class _Touched:
    owner: Any
    name: Any
    original: Any
    ours: Any


_touched: list[_Touched] = []


def _touches() -> Iterator[tuple[Any, Any, Callable[[Any], Any]]]:
    """`(class, module or dict, name, wrapper)`: what has that name becomes `wrapper(what it was)`."""
    from diffusers import DiffusionPipeline, ModelMixin
    from diffusers.hooks import (
        faster_cache,
        first_block_cache,
        group_offloading,
        mag_cache,
        pyramid_attention_broadcast,
    )
    from diffusers.loaders import (
        FluxLoraLoaderMixin,
        FromOriginalModelMixin,
        PeftAdapterMixin,
        lora_pipeline,
        single_file_model,
        single_file_utils,
    )
    from diffusers.loaders.transformer_flux import FluxTransformer2DLoadersMixin
    from diffusers.models import attention_dispatch
    from diffusers.models.attention import AttentionModuleMixin
    from diffusers.models.attention_processor import Attention

    from .hooks import caches, group_offload, stand_in, step_graph
    from .loaders import load, lora
    from .models import attention_dispatch as our_attention
    from .models import modeling_utils as ours
    from .pipelines import parallel_call

    # All versions: our configs go to our engine; every other config goes on to diffusers' own code.
    yield ModelMixin, "enable_parallelism", ours.wrap_enable_parallelism
    yield ModelMixin, "disable_parallelism", ours.wrap_disable_parallelism
    yield ModelMixin, "save_pretrained", ours.wrap_save_pretrained
    yield ModelMixin, "from_pretrained", ours.wrap_from_pretrained
    # All versions: many classes with a plan do not say which of their blocks to compile.
    yield ModelMixin, "compile_repeated_blocks", ours.wrap_compile_repeated_blocks
    # All versions: a model that will be sharded is read slice by slice.
    yield FromOriginalModelMixin, "from_single_file", ours.wrap_from_pretrained
    yield ModelMixin, "_load_pretrained_model", load.wrap_load_pretrained_model
    yield single_file_model, "load_model_dict_into_meta", load.wrap_load_model_dict_into_meta
    for module in (diffusers.models.modeling_utils, single_file_utils):
        yield module, "load_state_dict", load.wrap_load_state_dict
    # All versions: what these do to a sharded model has to know that it is sharded.
    for attention in (Attention, *_themselves_and_below(AttentionModuleMixin)):
        if "fuse_projections" in vars(attention):
            yield attention, "fuse_projections", ours.wrap_fuse_projections
    yield FluxTransformer2DLoadersMixin, "_load_ip_adapter_weights", ours.wrap_load_ip_adapter_weights
    # All versions: what is loaded, saved and merged of an adapter is that of the whole model.
    yield PeftAdapterMixin, "add_adapter", lora.wrap_add_adapter
    yield PeftAdapterMixin, "load_lora_adapter", lora.wrap_add_adapter
    yield PeftAdapterMixin, "save_lora_adapter", lora.wrap_save_lora_adapter
    yield PeftAdapterMixin, "fuse_lora", lora.wrap_fuse_lora
    yield PeftAdapterMixin, "unload_lora", lora.wrap_unload_lora
    yield FluxLoraLoaderMixin, "_calculate_module_shape", lora.wrap_calculate_module_shape
    yield diffusers.loaders.peft, "_create_lora_config", lora.wrap_create_config
    yield lora_pipeline, "_load_lora_into_text_encoder", lora.wrap_load_lora_into_text_encoder
    # 0.42: LoKr too is loaded.
    if hasattr(diffusers.loaders.peft, "_create_lokr_config"):
        yield diffusers.loaders.peft, "_create_lokr_config", lora.wrap_create_config
    # All versions: every attention backend serves our split sequences, whether it knows diffusers' or not.
    for backend in attention_dispatch._AttentionBackendRegistry._backends:
        yield from _touches_of_backend(backend)
    yield ModelMixin, "set_attention_backend", ours.wrap_set_attention_backend
    # All versions: pipelines that share their components share what makes them parallel.
    yield DiffusionPipeline, "register_modules", parallel_call.wrap_register_modules
    yield DiffusionPipeline, "_get_signature_types", stand_in.wrap_get_signature_types
    # A graph that captured collectives must be gone before their process group, which waits for it for ever.
    yield torch.distributed, "destroy_process_group", step_graph.wrap_destroy_process_group
    # All versions: ranks that share a forward must decide alike, and what mixes branches of guidance must have both.
    yield first_block_cache.FBCHeadBlockHook, "new_forward", caches.wrap_first_block
    yield mag_cache.MagCacheBlockHook, "new_forward", caches.wrap_mag_cache_block
    yield pyramid_attention_broadcast.PyramidAttentionBroadcastHook, "new_forward", caches.wrap_one_state
    yield faster_cache.FasterCacheBlockHook, "new_forward", caches.wrap_one_state
    yield faster_cache.FasterCacheDenoiserHook, "new_forward", caches.wrap_faster_cache_denoiser
    # 0.42: a cache that decides by the latents.
    if hasattr(diffusers.hooks, "SeaCacheConfig"):
        from diffusers.hooks.sea_cache import SeaCacheLeaderBlockHook

        yield SeaCacheLeaderBlockHook, "new_forward", caches.wrap_sea_cache_leader
    # All versions: ranks would overwrite each other's weights on disk.
    for module in (diffusers.hooks, group_offloading):
        yield module, "apply_group_offloading", group_offload.wrap_apply_group_offloading
    # 0.42: group offloading of quantised weights, which with a stream loses those that are pinned or not to be.
    if hasattr(group_offloading.ModuleGroup, "_to_cpu"):
        yield group_offloading.ModuleGroup, "_to_cpu", group_offload.wrap_to_cpu
    # 0.37 to 0.39: diffusers' own ring takes the shape of the log-sum-exp from the version of torch.
    if Version(diffusers.__version__) < Version("0.40"):
        for name in vars(attention_dispatch):
            if name.endswith("_forward_op"):
                yield attention_dispatch, name, our_attention.wrap_forward_op


def _touches_of_backend(backend: Any) -> Iterator[tuple[Any, Any, Callable[[Any], Any]]]:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    from .models.attention_dispatch import wrap_argument_names, wrap_backend

    yield registry._backends, backend, functools.partial(wrap_backend, backend)
    yield registry._supported_arg_names, backend, wrap_argument_names


def _themselves_and_below(cls: type) -> Iterator[type]:
    yield cls
    for each in cls.__subclasses__():
        yield from _themselves_and_below(each)


def register() -> None:
    """Extend diffusers' classes with ours. Idempotent and thread-safe; importing `diffusers_rocm` calls it."""
    with _lock:
        if not _touched:
            for touch in list(_touches()):
                _touch(*touch)


def register_late_backends() -> None:
    """Extend the attention backends that came after `register`: cache-dit puts its own in place of diffusers'."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    with _lock:
        ours = {id(each.ours) for each in _touched}
        for backend, function in list(_AttentionBackendRegistry._backends.items()):
            if id(function) not in ours:
                for touch in _touches_of_backend(backend):
                    _touch(*touch)


def unregister() -> None:
    """Undo `register`: every attribute is again the very object that it was.

    Raises:
        ValueError: models are parallel still, and could be neither saved nor restored afterwards.
    """
    from .models.modeling_utils import parallel_models

    with _lock:
        if _touched and (names := sorted(type(model).__name__ for model in parallel_models())):
            raise ValueError(f"call disable_parallelism() first: {', '.join(names)} would stay in parts for good")
        while _touched:
            last = _touched.pop()
            if last.original is _ABSENT:
                delattr(last.owner, last.name)
            else:
                _put(last.owner, last.name, last.original)


def _touch(owner: Any, name: Any, wrap: Callable[[Any], Any]) -> None:
    names = owner if isinstance(owner, dict) else vars(owner)
    original = names.get(name, _ABSENT)
    ours = wrap(None if original is _ABSENT else original)
    # What another package has put in place of ours is what is put back.
    _touched[:] = [each for each in _touched if each.owner is not owner or each.name != name]
    _touched.append(_Touched(owner, name, original, ours))
    _put(owner, name, ours)


def _put(owner: Any, name: Any, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)
