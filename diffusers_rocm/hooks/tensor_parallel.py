"""Tensor parallelism with plain local tensors (Shoeybi et al., 2019, "Megatron-LM").

A plan names a style for each module; a style says which slices of its parameters a rank keeps and which module it
becomes. The model's own, unmodified forward then runs on every rank. Nothing else happens: no DTensor, no hooks.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from diffusers.models.normalization import RMSNorm as DiffusersRMSNorm
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from torch import nn

from ..distributed.agreement import agree
from ..distributed.axis import Axis
from ..distributed.collectives import as_sent, broadcast_from_first
from ..distributed.quantized import (
    is_cuttable,
    is_quantized,
    kind,
    layouts,
    on_parts,
    parts,
    take,
    when_cut,
    with_parts,
)
from ..distributed.sharding import Block, Shard
from ..models.plans.plan import TensorParallelPlan, match, unmatched
from . import tensor_parallel_layers as layers


@dataclass(frozen=True)
class Style:
    """What happens to the modules of a rule.

    Attributes:
        accepts: the classes it can take, exactly these: a subclass may compute something else.
        becomes: the class of the sharded module, or what makes it of the class that there is; None leaves it.
        weight_dim: the dim of the weight that is cut; None for a module without weights of its own.
        bias_dim: the same for the bias; None keeps it whole, on the first rank alone.
    """

    accepts: tuple[type, ...] = ()
    becomes: type[nn.Module] | Callable[[type[nn.Module]], type[nn.Module]] | None = None
    weight_dim: int | None = None
    bias_dim: int | None = None

    def shards(self, module: nn.Module, blocks: tuple[Block, ...]) -> dict[str, Shard]:
        """Parameter name -> layout, for the parameters that this style cuts."""
        if self.weight_dim is None:
            return {}
        shards = {"weight": Shard(self.weight_dim, blocks)}
        if getattr(module, "bias", None) is not None:
            shards["bias"] = Shard(self.bias_dim, blocks if self.bias_dim is not None else ())
        return shards


STYLES: dict[str, Style] = {
    "column": Style((nn.Linear,), layers.ColumnParallelLinear, weight_dim=0, bias_dim=0),
    "column_of_part": Style((nn.Linear,), layers.ColumnOfPartLinear, weight_dim=0, bias_dim=0),
    "row": Style((nn.Linear,), layers.RowParallelLinear, weight_dim=1, bias_dim=None),
    "gather": Style((nn.Linear,), layers.GatheredColumnLinear, weight_dim=0, bias_dim=0),
    "modulation": Style((nn.Linear,), layers.ShardedModulationLinear, weight_dim=0, bias_dim=0),
    "embedding": Style((nn.Embedding,), layers.GatheredEmbedding, weight_dim=1),
    "conv_column": Style((nn.Conv2d,), layers.ColumnParallelConv2d, weight_dim=0, bias_dim=0),
    "conv_depthwise": Style((nn.Conv2d,), layers.DepthwiseConv2d, weight_dim=0, bias_dim=0),
    "conv_row": Style((nn.Conv2d,), layers.RowParallelConv2d, weight_dim=1, bias_dim=None),
    "conv_gather": Style((nn.Conv2d,), layers.GatheredColumnConv2d, weight_dim=0, bias_dim=0),
    "norm": Style((nn.RMSNorm, DiffusersRMSNorm, nn.LayerNorm), layers.across_heads, weight_dim=0, bias_dim=0),
    "head_norm": Style(becomes=layers.of_local_heads),
    "local": Style(),
    "local_input": Style(becomes=layers.with_local_input),
    "output": Style(becomes=layers.with_local_output),
    "slices": Style(),
    "partial": Style(becomes=layers.with_partial_output),
    "flux_ip_adapter": Style((FluxIPAdapterAttnProcessor,), layers.ShardedFluxIPAdapterAttnProcessor),
    "replicate": Style(),
}

# The styles of the A and the B of a LoRA (Hu et al., 2021) by that of what they adapt; None leaves one whole. The
# product B A is then cut as the weight is: merged or not, an adapter is this rank's part of it.
LORA_STYLES: dict[str, tuple[str | None, str | None]] = {
    "column": (None, "column"),
    "row": ("row", None),  # an all-reduce of as many features as the adapter's rank
    "gather": (None, "gather"),
    "modulation": (None, "gather"),
    "conv_column": (None, "conv_column"),
    "conv_row": ("conv_row", None),
    "conv_gather": (None, "conv_gather"),
}


@dataclass(frozen=True)
class Placement:
    """A rule that met a module: what will be done to it.

    Attributes:
        shards: parameter -> its layout.
        local: attribute of the module that counts something, or its `output` -> the layout of that.
    """

    path: str
    module: nn.Module
    style: str
    shards: dict[str, Shard]
    local: dict[str, Shard] = field(default_factory=dict)


def resolve(model: nn.Module, plan: TensorParallelPlan, world: int) -> list[Placement]:
    """Match the plan with the model. Reads shapes only, so a model on meta will do; changes nothing.

    Modules that are sharded already are passed over. Of a module with LoRA adapters, what it adapts and each A and B
    is placed by itself.

    Raises:
        ValueError: a rule that matches nothing, a module that its style cannot take, a degree that is too high, a
            config that the plan is not for.
    """
    _check_config(model, plan, world)
    if missing := unmatched(model, plan.rules):
        raise ValueError(f"the plan of {type(model).__name__} does not fit this model: nothing is at {missing[0]!r}")
    placements = []
    for rule, rule_style, found in match(model, plan.rules):
        rule_name, _, argument = rule_style.partition(":")
        if rule_name not in STYLES:
            raise ValueError(f"{rule}: there is no style {rule_name!r}, only {', '.join(STYLES)}")
        for path, module, name in [part for each in found for part in _with_adapters(*each, rule_name)]:
            left_out = STYLES[name].accepts and type(module) is nn.Identity  # a norm
            if not hasattr(module, "sharding") and not left_out:
                placements.append(_placement(path, module, name, argument, plan, model.config, world))
    _refuse_unplanned_processors(model, plan)
    return placements


def _check_config(model: nn.Module, plan: TensorParallelPlan, world: int) -> None:
    """Raises ValueError where the plan is not for the model's config, or where ranks would have no head."""
    for reason, is_such in plan.impossible.items():
        if is_such(model.config):
            raise ValueError(f"this {type(model).__name__} cannot be sharded: {reason}")
    for name, count in plan.head_counts(model.config).items():
        if world > count:
            of_keys = any(each.startswith(("kv", "keys")) for each in plan.heads)
            what = "key/value heads" if of_keys else f"attention {name}"
            raise ValueError(
                f"tp={world} exceeds the {count} {what} of this {type(model).__name__}; use tp <= {count}"
            )


def _placement(
    path: str, module: nn.Module, name: str, argument: str, plan: TensorParallelPlan, config: Any, world: int
) -> Placement:
    """What the style of this name, with its argument in the plan, does to a module.

    Raises:
        ValueError: a module that the style cannot take, or with too few parts for the ranks.
    """
    style = STYLES[name]
    if style.accepts and type(module) not in style.accepts:
        accepted = " or ".join(cls.__name__ for cls in style.accepts)
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        raise ValueError(
            f"{path} is a {kind} and cannot be sharded, only a {accepted} can: load the model unquantised and "
            "without adapters, then enable parallelism"
        )
    blocks: tuple[Block, ...] = ()
    if style.weight_dim is not None:
        if not is_cuttable(module.weight):
            raise ValueError(
                f"the weight of {path} is a {type(module.weight).__name__} and cannot be cut: enable "
                "parallelism on the unquantised model, then quantise its shards"
            )
        blocks = plan.blocks(argument or "mlp", module.weight.shape[style.weight_dim], config, world)
    shards, local = style.shards(module, blocks), {}
    match name:
        case "local" | "local_input":
            local = plan.attributes(argument, module, config, world)
            shards |= {key: local.pop(key) for key in module._parameters if key in local}
        case "output":
            dim, _, layout = argument.rpartition("=")
            local = {dim or "output": plan.head_shard(layout, config)}
        case "slices" | "partial":
            shards = plan.slices(argument, module, config, world)
    for key, shard in shards.items():
        try:
            when_cut(getattr(module, key), shard)
        except ValueError as error:
            raise ValueError(
                f"the quantised {key} of {path} cannot be cut for tp={world}: {error}; enable parallelism on "
                "the unquantised model, then quantise its shards"
            ) from None
        for block in shard.blocks:
            if (count := block.size // block.unit) < world:
                raise ValueError(f"tp={world} is more than the {count} parts of {path}")
    return Placement(path, module, name, shards, local)


def base_layer(module: nn.Module) -> nn.Module:
    """What an adapter of PEFT was put around, or the module itself."""
    return getattr(module, "base_layer", module)


def _with_adapters(path: str, module: nn.Module, style: str) -> list[tuple[str, nn.Module, str]]:
    """`(path, module, style)` of a module that a rule names, or of the parts that a LoRA has made of it."""
    if base_layer(module) is module or style == "replicate":
        return [(path, module, style)]
    from peft.tuners import lora
    from peft.tuners.lora.torchao import TorchaoLoraLinear

    kinds = {name: type(variant).__name__ for name, variant in getattr(module, "lora_variant", {}).items()}
    if type(module) not in (lora.Linear, lora.Conv2d, TorchaoLoraLinear) or kinds or style not in LORA_STYLES:
        kind = ", ".join(kinds.values()) or f"{type(module).__module__}.{type(module).__qualname__}"
        raise ValueError(
            f"{path} ({style}) cannot be sharded with its adapter, a {kind}; plain LoRA of a Linear or a Conv2d can: "
            "call fuse_lora() and unload_lora_weights() before parallelism is enabled"
        )
    parts = [(f"{path}.base_layer", module.base_layer, style)]
    for side, of_side in zip(("lora_A", "lora_B"), LORA_STYLES[style], strict=True):
        if of_side is not None:
            parts += [(f"{path}.{side}.{name}", each, of_side) for name, each in getattr(module, side).items()]
    return parts


def _refuse_unplanned_processors(model: nn.Module, plan: TensorParallelPlan) -> None:
    """Layers that a user's processor brings see local heads: without a rule they would be silently wrong."""
    planned = tuple(path for _, _, found in match(model, plan.rules) for path, _ in found if path)
    for path, module in model.named_modules():
        known = path in planned or path.startswith(tuple(f"{each}." for each in planned if "processor" in each))
        if ".processor." in path and isinstance(module, nn.Linear) and not known:
            processor = type(model.get_submodule(f"{path.partition('.processor.')[0]}.processor")).__name__
            raise ValueError(
                f"the plan of {type(model).__name__} has no rule for {path}, of a {processor}: set another processor, "
                "or keep this model whole"
            )


@torch.inference_mode(False)
def shard_modules(placements: list[Placement], axis: Axis, source: Axis | None = None) -> None:
    """Turn each placed module into this rank's part of it.

    With a `source` the slices are those of its first rank's weights, sent one parameter at a time.
    """
    for placement in placements:
        module, style = placement.module, STYLES[placement.style]
        if placement.style == "replicate":
            continue
        attributes: dict[str, Any] = {"__class__": type(module)}
        shapes, requires_grad, of_parts = {}, {}, {}
        for name, shard in placement.shards.items():
            parameter = getattr(module, name)
            shapes[name], requires_grad[name] = parameter.shape, parameter.requires_grad
            full = parameter.detach()
            if source is not None:
                full = on_parts(functools.partial(broadcast_from_first, axis=source), full)
            if is_quantized(full):
                of_parts[name] = when_cut(full, shard)
            _set_parameter(module, name, take(shard, full, axis.rank, axis.size), parameter.requires_grad)
        if placement.style in ("local", "local_input"):
            for name, shard in placement.local.items():
                attributes[name] = getattr(module, name)
                setattr(module, name, shard.share(attributes[name], axis.rank, axis.size))
        if isinstance(module, nn.Linear):
            attributes.update(in_features=module.in_features, out_features=module.out_features)
            module.out_features, module.in_features = module.weight.shape
        if style.becomes is not None:
            sharded = style.becomes if isinstance(style.becomes, type) else style.becomes(type(module))
            become(module, sharded)
        of_module = placement.shards, shapes, requires_grad, attributes, placement.local, of_parts
        module.sharding = layers.Sharding(axis, *of_module)


@torch.inference_mode(False)
def unshard_modules(model: nn.Module) -> None:
    """Gather every sharded module back to what it was, in the order of the model's modules, on all ranks."""
    for module in sharded_modules(model):
        sharding = module.sharding
        for name in sharding.shards:
            local = getattr(module, name)
            requires_grad = sharding.requires_grad[name] if local is None else local.requires_grad
            _set_parameter(module, name, gather_parameter(module, name), requires_grad)
        for name, value in sharding.attributes.items():
            if name != "__class__":
                setattr(module, name, value)
        become(module, sharding.attributes["__class__"])
        del module.sharding


def sharded_modules(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in list(model.modules()) if hasattr(module, "sharding"))


def gather_parameter(module: nn.Module, name: str, assemble: bool = True) -> torch.Tensor | None:
    """The full parameter of a sharded module, on the device of its shard. All ranks of the axis must call it.

    A rank that says `assemble=False` takes part but keeps nothing, and gets None.
    """
    sharding = module.sharding
    axis, shard, shape = sharding.axis, sharding.shards[name], sharding.shapes[name]
    local = getattr(module, name)
    if shard.dim is None:
        like = module.weight if local is None else local
        buffer = torch.empty(shape, dtype=like.dtype, device=axis.device)
        if local is not None:
            buffer.copy_(local.detach())
        full = broadcast_from_first(buffer, axis).to(like.device)
        return full if assemble else None
    made_of = {}
    for part_name, layout in layouts(local, shard, shape, axis, sharding.parts.get(name)).items():
        part = parts(local.detach())[part_name]
        made_of[part_name] = part if layout is None else _gather(part, layout, axis, assemble)
    return with_parts(local, made_of, shape) if assemble else None


def _gather(local: torch.Tensor, shard: Shard, axis: Axis, assemble: bool) -> torch.Tensor | None:
    shape = list(local.shape)
    shape[shard.dim] = sum(shard.sizes(axis.size))
    full = local.new_empty(shape) if assemble else None
    for rank in range(axis.size):
        if rank == axis.rank:
            buffer = local.to(axis.device).contiguous()
        else:
            buffer = local.new_empty(shard.local_shape(shape, rank, axis.size), device=axis.device)
        if axis.size > 1:
            dist.broadcast(as_sent(buffer), src=dist.get_global_rank(axis.group, rank), group=axis.group)
        if assemble:
            shard.put(full, buffer, rank, axis.size)
    return full


def check_can_be_whole(model: nn.Module, adapters_only: bool = False) -> None:
    """All ranks that share the model must call it.

    Raises:
        ValueError: shards that were quantised each by itself, which no whole weight is made of, or otherwise on some
            ranks; on all of them.
    """
    shards = [
        (path, name, getattr(module, name), module.sharding)
        for path, module in model.named_modules()
        if ".lora_" in path or not adapters_only
        for name, shard in getattr(getattr(module, "sharding", None), "shards", {}).items()
        if shard.dim is not None
    ]
    if not shards:
        return
    agree("kinds of weights", {f"{path}.{name}": kind(local) for path, name, local, _ in shards}, shards[0][-1].axis)
    for path, name, local, sharding in shards:
        try:
            layouts(local, sharding.shards[name], sharding.shapes[name], sharding.axis, sharding.parts.get(name))
        except ValueError as error:
            raise ValueError(
                f"the shards of {path}.{name} were quantised and cannot be made whole ({error}): load the model "
                "again, or quantise it before parallelism is enabled"
            ) from None


def adopt_fused_projection(attention: nn.Module, fused: str, parts: tuple[str, ...]) -> None:
    """`fuse_projections` on a sharded attention made a plain Linear of local slices: say what it holds."""
    module = getattr(attention, fused)
    shardings = [base_layer(getattr(attention, part)).sharding for part in parts]
    axis = shardings[0].axis
    shards, shapes = {}, {}
    for name in shardings[0].shards:
        blocks = tuple(block for sharding in shardings for block in sharding.shards[name].blocks)
        shards[name] = Shard(0, blocks)
        shapes[name] = torch.Size((sum(block.size for block in blocks), *shardings[0].shapes[name][1:]))
    attributes = {
        "__class__": type(module),
        "in_features": module.in_features,
        "out_features": shapes["weight"][0],
    }
    module.__class__ = layers.ColumnParallelLinear
    requires_grad = {name: getattr(module, name).requires_grad for name in shards}
    module.sharding = layers.Sharding(axis, shards, shapes, requires_grad, attributes)


def become(module: nn.Module, cls: type[nn.Module]) -> None:
    """Give the module another class, also where hooks of diffusers or accelerate hold on to the forward it had."""
    found = type(module).forward
    module.__class__ = cls
    for holder in (module, *getattr(getattr(module, "_diffusers_hook", None), "_fn_refs", ())):
        for name in ("forward", "original_forward", "_old_forward"):
            if getattr(vars(holder).get(name), "__func__", None) is found:
                setattr(holder, name, cls.forward.__get__(module))


def _set_parameter(module: nn.Module, name: str, value: torch.Tensor | None, requires_grad: bool) -> None:
    setattr(module, name, None if value is None else nn.Parameter(value, requires_grad=requires_grad))
