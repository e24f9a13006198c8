"""What `registration.py` puts on diffusers' models: enabling, disabling, saving and loading under our configs."""

import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from diffusers.quantizers.quantization_config import QuantizationMethod
from diffusers.utils import logging
from safetensors import SafetensorError
from torch import nn

from ..distributed.agreement import fail_together
from ..distributed.axis import Axis
from ..distributed.choices import computes_beside, gelu_is_in_products
from ..distributed.collectives import broadcast_from_first
from ..distributed.fused_gelu import FUSE_GELU
from ..distributed.links import gpus_of, links_are_slow
from ..distributed.mesh import JOINED, Axes
from ..distributed.overlap import HIDE_MESSAGES
from ..distributed.quantized import parts
from ..hooks.cfg_parallel import GuidanceParallel
from ..hooks.context_parallel import attention_modules, split_sequences
from ..hooks.group_offload import check_weights_are_here, regroup
from ..hooks.modulation import share_modulation
from ..hooks.sequence_split import SequenceSplit, SplitProcessor
from ..hooks.tensor_parallel import (
    adopt_fused_projection,
    base_layer,
    check_can_be_whole,
    resolve,
    shard_modules,
    sharded_modules,
    unshard_modules,
)
from ..hooks.token_slices import TokenSlices
from ..hooks.weight_agreement import first_difference
from ..loaders.load import cannot_cut, shard_additions, sharded_loading
from ..loaders.lora import settle_lora_biases
from ..loaders.save import save_checkpoint
from ..loaders.stored_tensor import some, stored_tensors
from ..registration import register_late_backends
from ._modeling_parallel import OurConfig, TensorParallelConfig
from .attention_dispatch import check_ring_backend
from .plans import get_context_parallel_plan, get_tensor_parallel_plan, has_plan
from .plans.context_plan import ContextParallelPlan
from .plans.plan import TensorParallelPlan


logger = logging.get_logger(__name__)


class Removable(Protocol):
    """What can be taken off a model again."""

    def remove(self) -> None: ...


_ever_parallel: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def parallel_models() -> list[nn.Module]:
    """The models of this process that are spread over several ranks under a config of ours."""
    gc.collect()  # models refer to themselves through their hooks
    enabled = (model for model in _ever_parallel if getattr(model, "parallelism", None) is not None)
    return [model for model in enabled if model.parallelism.axes.world.size > 1]


@dataclass(frozen=True)
class Parallelism:
    """What a parallel model knows about itself, in its attribute `parallelism`.

    Attributes:
        config: what was asked for.
        axes: the ranks that share the model, and how.
        hooks: what was hung on the model, each with a `remove()`.
        split: what its attention knows of split sequences.
        slices: what its products know of tokens in slices.
    """

    config: OurConfig
    axes: Axes
    hooks: list[Removable] = field(default_factory=list)
    split: SequenceSplit | None = None
    slices: TokenSlices | None = None


def enable(
    model: nn.Module, config: OurConfig, cp_plan: Mapping[str, Any] | ContextParallelPlan | None = None
) -> None:
    """Split the sequences of `model` over the ring and Ulysses axes, then shard its weights over the tp axis.

    Everything is checked before anything changes. Where the ranks' weights differ (random initialisation without a
    common seed), the first rank's are taken, and a warning says so. The links are timed.

    Gradients: those of the inputs are exact, and those of sharded parameters are of the shard. With split sequences
    those of all parameters are each rank's tokens' share, to be summed over `model.parallelism.axes.context`.

    Raises:
        ValueError: the model or the config cannot be had so; the message says what would work.
    """
    _check_free_and_loaded(model, config)
    check_weights_are_here(model, "enable parallelism first, then offloading")
    axes = config.axes()
    placements, plan = [], None
    if axes.tp.size > 1 or isinstance(config, TensorParallelConfig):
        tp_plan = get_tensor_parallel_plan(type(model))
        placements = resolve(model, tp_plan, axes.tp.size)
        _check_heads(model, tp_plan, axes)
    if axes.context.size > 1:
        plan = get_context_parallel_plan(type(model), cp_plan)
        if axes.ring.size > 1 and config.rotate_method == "p2p":
            for path, module in attention_modules(model, plan):
                check_ring_backend(path, getattr(module.processor, "_attention_backend", None))
        register_late_backends()
    elif cp_plan is not None:
        raise ValueError(f"cp_plan is for context parallelism; {config} takes none")
    axes = _with_links(axes)
    split = None if plan is None else SequenceSplit(type(model).__name__, plan, axes, config.rotate_method)
    differ = _weights_differ(model, axes.world)
    hooks = split_sequences(model, split) if split is not None else []
    if differ:
        sharded = {id(p.module) for p in placements if p.shards and axes.tp.size > 1}
        sharded |= {id(module) for module in sharded_modules(model) if module.sharding.shards}
        _broadcast_unsharded(model, sharded, axes.world)
    slices = None
    if axes.tp.size > 1 and tp_plan.token_slices is not None:
        slices = TokenSlices(model, tp_plan.token_slices, axes, split)
        hooks.append(slices)
    model.parallelism = Parallelism(config, axes, hooks, split, slices)
    _ever_parallel.add(model)
    if axes.tp.size > 1:
        shard_modules(placements, axes.tp, source=axes.world if differ else None)
        settle_lora_biases(model)
        regroup(model)
    hooks += share_modulation(model, axes)
    if axes.cfg.size > 1:
        hooks.append(GuidanceParallel(model, axes.cfg))


def _with_links(axes: Axes) -> Axes:
    """These, and of those that send activations what they are like."""
    if axes.model.size == 1:
        return axes
    count, known = gpus_of(axes.model)
    sending = {name: replace(getattr(axes, name), multiprocessors=count, known_gpus=known) for name in JOINED["model"]}
    return replace(axes, **{name: replace(axis, slow_links=links_are_slow(axis)) for name, axis in sending.items()})


def _check_heads(model: nn.Module, plan: TensorParallelPlan, axes: Axes) -> None:
    """Every rank must have heads to trade, or some would fail where others wait."""
    for name, count in plan.head_counts(model.config).items():
        least = count // axes.tp.size
        if least < axes.ulysses.size:
            raise ValueError(
                f"{count} attention {name} over tp={axes.tp.size} leave {least} to a rank, too few for ulysses="
                f"{axes.ulysses.size}; use ulysses <= {least}, and ring for the rest"
            )


def _check_free_and_loaded(model: nn.Module, config: OurConfig) -> None:
    name = type(model).__name__
    if getattr(model, "parallelism", None) is not None or getattr(model, "_parallel_config", None) is not None:
        current = getattr(model, "parallelism", None) or model._parallel_config
        raise ValueError(
            f"this {name} is parallel already ({getattr(current, 'config', current)}); call disable_parallelism() "
            f"before enabling {config}"
        )
    meta = [path for path, parameter in model.named_parameters() if parameter.is_meta]
    if meta:
        held = any(getattr(module, "_hf_hook", None) is not None for module in model.modules())
        way_out = (
            "accelerate holds them, as after enable_sequential_cpu_offload(): use enable_model_cpu_offload() or "
            "enable_group_offload()"
            if held
            else "load the weights first, for example with from_pretrained(path, parallel_config=...)"
        )
        raise ValueError(f"{len(meta)} parameters of this {name} are on the meta device ({meta[0]}, ...): {way_out}")


def _weights_differ(model: nn.Module, axis: Axis) -> bool:
    difference = first_difference(model, axis) if axis.size > 1 else None
    if difference is not None and axis.rank == 0:
        logger.warning(f"the ranks' weights differ, first in {difference}: all ranks take those of the first rank")
    return difference is not None


@torch.no_grad()
def _broadcast_unsharded(model: nn.Module, sharded: set[int], axis: Axis) -> None:
    for module in model.modules():
        if id(module) in sharded:
            continue
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            for part in parts(tensor).values():
                part.copy_(broadcast_from_first(part, axis))


def _ours(config: Any) -> OurConfig | None:
    """Our config, given as it is or inside diffusers' ParallelConfig; None for a config that is diffusers' own."""
    if isinstance(config, OurConfig):
        return config
    for inner in ("tensor_parallel_config", "context_parallel_config"):
        config = getattr(config, inner, None) or config
    return config if isinstance(config, OurConfig) else None


def wrap_enable_parallelism(original: Callable) -> Callable:
    @functools.wraps(original, assigned=("__module__", "__name__", "__qualname__"))
    def enable_parallelism(self, *, config, cp_plan=None):
        """Make the model parallel, in place, on all ranks that share it.

        Args:
            config: of diffusers_rocm (`TensorParallelConfig`, `ContextParallelConfig`, `CFGParallelConfig`,
                `DataParallelConfig`, `ParallelConfig`), or diffusers' own, which goes to diffusers' own code.
            cp_plan: for context parallelism, where sequences are split: a ContextParallelPlan, or the format of
                diffusers' `_cp_plan`; by default the plan of the class.

        On GPUs the links of ranks that share a forward are timed, by some all-to-alls of 64 MiB.

        Raises:
            ValueError: the model or the config cannot be had; nothing is changed then.
        """
        ours = _ours(config)
        if ours is not None:
            return enable(self, ours, cp_plan)
        if getattr(self, "parallelism", None) is not None:
            raise ValueError(
                f"this {type(self).__name__} is parallel already ({self.parallelism.config}); call "
                "disable_parallelism() first"
            )
        return original(self, config=config, cp_plan=cp_plan)

    return enable_parallelism


def wrap_disable_parallelism(original: Callable | None) -> Callable:
    def disable_parallelism(self) -> None:
        """Undo `enable_parallelism`: plain modules with every weight as it was, on all ranks.

        Raises:
            ValueError: the model is not parallel under a config of diffusers_rocm.
        """
        if getattr(self, "parallelism", None) is None:
            raise ValueError(f"this {type(self).__name__} is not parallel; there is nothing to disable")
        is_sharded = next(sharded_modules(self), None) is not None
        if is_sharded:
            check_weights_are_here(self, "they cannot be made whole; load the model again")
            check_can_be_whole(self)
        while self.parallelism.hooks:
            self.parallelism.hooks.pop().remove()
        if is_sharded:
            unshard_modules(self)
            settle_lora_biases(self)
            regroup(self)
        del self.parallelism

    return disable_parallelism


def check_can_be_saved(model: nn.Module) -> None:
    """Raises ValueError where a parallel model cannot be made into a checkpoint."""
    check_weights_are_here(model, "save the model before it is offloaded")
    # bitsandbytes and GGUF have parameters of their own, and keep beside them what they were rounded by.
    if any(type(parameter) is not nn.Parameter for parameter in model.parameters()):
        raise ValueError(f"this {type(model).__name__} is quantised, and is not saved while it is parallel")


def wrap_save_pretrained(original: Callable) -> Callable:
    """A parallel model is written as the full checkpoint; all ranks call it."""

    @functools.wraps(original)
    def save_pretrained(self, save_directory, *args, **kwargs):
        parallelism = getattr(self, "parallelism", None)
        if parallelism is None or parallelism.axes.world.size == 1:
            return original(self, save_directory, *args, **kwargs)
        check_can_be_saved(self)
        return save_checkpoint(self, save_directory, *args, **kwargs)

    return save_pretrained


def wrap_from_pretrained(original: classmethod) -> classmethod:
    """Of `from_pretrained` and `from_single_file`: under a config of ours, each rank reads what it keeps."""

    @functools.wraps(original.__func__)
    def from_pretrained(cls, *args, **kwargs):
        ours = _ours(kwargs.get("parallel_config"))
        if ours is None:
            return original.__func__(cls, *args, **kwargs)
        kwargs.pop("parallel_config")
        axes, quantization = ours.axes(), kwargs.get("quantization_config")
        method = getattr(quantization, "quant_method", None)
        if method not in (None, QuantizationMethod.TORCHAO) and axes.tp.size > 1:
            name = "GGUF" if method == QuantizationMethod.GGUF else getattr(method, "value", method)
            raise cannot_cut(name, cls.__name__)
        whole_file = original.__name__ == "from_single_file"
        if whole_file and quantization is not None and method != QuantizationMethod.GGUF:
            raise ValueError(
                "diffusers quantises nothing that it reads from a single file: quantise the parallel model, or "
                "save it by save_pretrained and load that"
            )
        if kwargs.get("use_safetensors") is False:
            raise ValueError(
                f"the weights of a parallel {cls.__name__} are read from safetensors, and never from pickles: leave "
                "use_safetensors=False out, and save_pretrained an unparallel one where there are only pickles"
            )
        if not whole_file:
            kwargs.setdefault("use_safetensors", True)
        with fail_together(f"load a {cls.__name__}", axes.world), sharded_loading(axes.tp):
            try:
                loaded = original.__func__(cls, *args, **kwargs)
            except SafetensorError:  # of a reader that does not name the file
                for file in sorted(Path(str(args[0] if args else "")).rglob("*.safetensors")):
                    stored_tensors(file)
                raise
            model = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info
            missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
            if missing:
                raise ValueError(f"the checkpoint of this {cls.__name__} lacks {some(missing)}")
        model.enable_parallelism(config=ours)
        return loaded

    return classmethod(from_pretrained)


def wrap_fuse_projections(original: Callable) -> Callable:
    """A fused projection of local slices is one of a sharded attention."""
    fusions = {
        "to_qkv": ("to_q", "to_k", "to_v"),
        "to_kv": ("to_k", "to_v"),
        "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
        "to_added_kv": ("add_k_proj", "add_v_proj"),
    }

    @functools.wraps(original)
    def fuse_projections(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        for fused, names in fusions.items():
            plain = hasattr(self, fused) and not hasattr(getattr(self, fused), "sharding")
            if plain and hasattr(base_layer(getattr(self, names[0])), "sharding"):
                adopt_fused_projection(self, fused, names)
        return result

    return fuse_projections


def wrap_load_ip_adapter_weights(original: Callable) -> Callable:
    """The processors of an IP-Adapter come whole, and are cut as the plan says."""

    @functools.wraps(original)
    def _load_ip_adapter_weights(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        shard_additions(self)
        return result

    return _load_ip_adapter_weights


def wrap_set_attention_backend(original: Callable) -> Callable:
    @functools.wraps(original)
    def set_attention_backend(self, backend: str) -> None:
        """Some versions refuse backends that diffusers' own context parallelism lacks; ours takes all of them."""
        parallelism = getattr(self, "parallelism", None)
        if parallelism is None or parallelism.axes.context.size == 1:
            return original(self, backend)
        if parallelism.axes.ring.size > 1 and parallelism.config.rotate_method == "p2p":
            check_ring_backend(type(self).__name__, backend)
        register_late_backends()
        processors = [hook for hook in parallelism.hooks if isinstance(hook, SplitProcessor)]
        for processor in processors:
            processor.pause()
        try:
            return original(self, backend)
        finally:
            for processor in processors:
                processor.resume()

    return set_attention_backend


def outermost_lists(model: nn.Module) -> Iterator[nn.ModuleList]:
    """The lists of a model that are in no other list: its blocks, for the most part."""
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(part.isdigit() for part in path.split(".")):
            yield module


def wrap_compile_repeated_blocks(original: Callable) -> Callable:
    @functools.wraps(original)
    def compile_repeated_blocks(self, *args, **kwargs) -> None:
        """Many classes with a plan do not name their blocks: what has several Linears in a list is one.

        Over fast links those of split sequences have gelu in the product before it. Where links are slow, or messages
        occupy no multiprocessor, as in graphs, they go beside what does not need them. Neither if `options` or a
        `mode` are given.
        """
        split = getattr(getattr(self, "parallelism", None), "split", None)
        if split is not None and kwargs.get("backend", "inductor") == "inductor":
            if not kwargs.keys() & {"mode", "options"}:
                chosen = {}
                if gelu_is_in_products(self.parallelism.axes.tp, split.ring, split.ulysses):
                    logger.info("compiled blocks have gelu in the product before it, in bfloat16")
                    chosen |= FUSE_GELU
                if computes_beside(split.ring, split.ulysses):
                    chosen |= HIDE_MESSAGES
                kwargs["options"] = chosen
        if self._repeated_blocks or not has_plan(type(self)):
            return original(self, *args, **kwargs)
        for block in (block for blocks in outermost_lists(self) for block in blocks):
            linears = sum(isinstance(module, nn.Linear) for module in block.modules())
            if linears > 1 and not isinstance(block, nn.ModuleList):
                block.compile(*args, **kwargs)

    return compile_repeated_blocks
