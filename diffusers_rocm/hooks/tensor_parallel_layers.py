"""The modules that a sharded model is made of.

Each holds its slice as a plain Parameter and stays an instance of what it was, so that PEFT, torchao, offloading and
`state_dict` see an ordinary Linear. A module becomes one of these in place, by its class: every reference to it, and
every hook on it, stays good.
"""

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from torch import nn

from ..distributed.axis import Axis
from ..distributed.collectives import copy_to_axis, gather_from_axis, reduce_from_axis, sum_over_axis
from ..distributed.sharding import Shard
from .stand_in import stands_in_for


if TYPE_CHECKING:
    from .token_slices import TokenSlices


@dataclass(frozen=True)
class Sharding:
    """What a sharded module knows about itself, in its attribute `sharding`.

    Attributes:
        axis: the ranks that hold the rest.
        shards: parameter name -> its layout.
        shapes: parameter name -> its full shape.
        requires_grad: parameter name -> whether it was trained; a rank without its share of a bias cannot tell.
        attributes: what sharding overwrote, as it was: class and sizes.
        local: what else is local, as in the `Placement`.
        parts: parameter name -> layouts of the parts of a quantised one that was cut; None for what all ranks have.
    """

    axis: Axis
    shards: dict[str, Shard] = field(default_factory=dict)
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    requires_grad: dict[str, bool] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    local: dict[str, Shard] = field(default_factory=dict)
    parts: dict[str, dict[str, Shard | None]] = field(default_factory=dict)


class ColumnParallelLinear(nn.Linear):
    """A slice of the output features; the input is replicated, the output stays sharded."""

    sharding: Sharding
    slices: "TokenSlices | None" = None
    together: tuple[nn.Linear, ...] = ()  # those of the same input, in slices
    made: tuple[torch.Tensor, torch.Tensor] | None = None  # such an input, and what comes of it here

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.slices is not None and self.slices.active:
            return self.slices.project(self, x)
        return F.linear(copy_to_axis(x, self.sharding.axis), self.weight, self.bias)


class ColumnOfPartLinear(ColumnParallelLinear):
    """A slice of the output features; the input, of which a rank has the features of its own heads, is gathered.

    For attention that takes the width of its heads from that of its input (`with_local_input`), which every rank had
    whole: where it comes here as it is, nothing is gathered.
    """

    whole: tuple[torch.Tensor, torch.Tensor] | None = None  # this rank's part of an input, and all of it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.whole is not None and x is self.whole[0]:
            return super().forward(self.whole[1])
        axis, shard, features = self.sharding.axis, self.sharding.shards["weight"], self.sharding.shapes["weight"][1]
        sizes = tuple(shard.share(features, rank, axis.size) for rank in range(axis.size))
        return super().forward(gather_from_axis(x, sizes, axis))


class RowParallelLinear(nn.Linear):
    """A slice of the input features; the input is sharded, the output is the sum over the ranks.

    The bias is on the first rank alone, where the matrix product adds it.
    """

    sharding: Sharding
    slices: "TokenSlices | None" = None
    later: bool = False  # in slices it is made, with others, when the module that it is of ends

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.slices is not None and self.slices.active:
            return self.slices.scatter(self, x)
        return reduce_from_axis(F.linear(x, self.weight, self.bias), self.sharding.axis)


class GatheredColumnLinear(nn.Linear):
    """A slice of the output features; the input is replicated, and so is the output, which is gathered.

    For weights that are large where their output is small, such as the modulation of adaptive layer norms.
    """

    sharding: Sharding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        axis = self.sharding.axis
        sizes = self.sharding.shards["weight"].sizes(axis.size)
        return gather_from_axis(F.linear(copy_to_axis(x, axis), self.weight, self.bias), sizes, axis)


class ModulationLinear(nn.Linear):
    """One of many Linears with the same input, computed together beforehand (`hooks.modulation`); else by itself.

    By itself too where it is asked for some of the rows alone.
    """

    ready: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ready = self.ready
        return super().forward(x) if ready is None or len(ready) != len(x) else ready


class ShardedModulationLinear(ModulationLinear, GatheredColumnLinear):
    """One that has a slice of the output features."""


class GatheredEmbedding(nn.Embedding):
    """A slice of the features of a table's rows, which are gathered."""

    sharding: Sharding

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        axis = self.sharding.axis
        return gather_from_axis(super().forward(index), self.sharding.shards["weight"].sizes(axis.size), axis)


class ColumnParallelConv2d(nn.Conv2d):
    """A slice of the output channels; the input is replicated, the output stays sharded."""

    sharding: Sharding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(copy_to_axis(x, self.sharding.axis))


class GatheredColumnConv2d(ColumnParallelConv2d):
    """A slice of the output channels; the output is gathered."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        axis = self.sharding.axis
        return gather_from_axis(super().forward(x), self.sharding.shards["weight"].sizes(axis.size), axis, 1)


class DepthwiseConv2d(nn.Conv2d):
    """Channels each by itself, of which a rank has those of its input."""

    sharding: Sharding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = len(self.weight)
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, groups)


class RowParallelConv2d(nn.Conv2d):
    """A slice of the input channels; the input is sharded, the output is the sum over the ranks."""

    sharding: Sharding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return reduce_from_axis(super().forward(x).contiguous(), self.sharding.axis)


@functools.cache
def with_partial_output(cls: type[nn.Module]) -> type[nn.Module]:
    """`cls`, of whose parameters each rank has slices such that its output is a part of a sum (packed experts)."""

    @stands_in_for(cls)
    class WithPartialOutput(cls):
        def forward(self, x, *args, **kwargs):
            axis = self.sharding.axis
            return reduce_from_axis(super().forward(copy_to_axis(x, axis), *args, **kwargs), axis)

    return WithPartialOutput


@functools.cache
def of_local_heads(cls: type[nn.Module]) -> type[nn.Module]:
    """`cls`, a norm within a head: replicated, but each rank sees its own heads only, so the gradients are summed."""

    @stands_in_for(cls)
    class OfLocalHeads(cls):
        def forward(self, *args, **kwargs):
            if not torch.is_grad_enabled():
                return super().forward(*args, **kwargs)
            whole = dict(self._parameters)
            axis = self.sharding.axis
            self._parameters.update({k: v if v is None else copy_to_axis(v, axis) for k, v in whole.items()})
            try:
                return super().forward(*args, **kwargs)
            finally:
                self._parameters.update(whole)

    return OfLocalHeads


@functools.cache
def with_local_output(cls: type[nn.Module]) -> type[nn.Module]:
    """`cls`, of whose outputs attention takes what its local heads need: rotary embeddings over all heads.

    They are [B, S, heads x dim] or [B, heads, S, dim], if the plan names no dim.
    """

    @stands_in_for(cls)
    class WithLocalOutput(cls):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            return tuple(map(self._local, output)) if isinstance(output, tuple) else self._local(output)

        def _local(self, x: torch.Tensor) -> torch.Tensor:
            axis, ((dim, shard),) = self.sharding.axis, self.sharding.local.items()
            return _share_of(x, int(dim) if dim != "output" else 1 if x.ndim == 4 else x.ndim - 1, shard, axis)

    return WithLocalOutput


def _share_of(x: torch.Tensor, dim: int, shard: Shard, axis: Axis) -> torch.Tensor:
    """This rank's part of `x`, whose `dim` is dealt as the shard is."""
    before = sum(shard.share(x.shape[dim], rank, axis.size) for rank in range(axis.rank))
    return copy_to_axis(x, axis).narrow(dim, before, shard.share(x.shape[dim], axis.rank, axis.size))


def _copied(value: Any, axis: Axis) -> Any:
    """`copy_to_axis` of a tensor, or of those in a tuple."""
    if isinstance(value, tuple):
        return tuple(_copied(item, axis) for item in value)
    return copy_to_axis(value, axis) if isinstance(value, torch.Tensor) else value


@functools.cache
def with_local_input(cls: type[nn.Module]) -> type[nn.Module]:
    """`cls`, attention that gives its heads the shape of its input, of which it is given the features of its heads.

    How these are dealt is that of the first attribute in the plan's rule. What it is given by keyword is read by its
    heads alone: gradients are summed.
    """

    @stands_in_for(cls)
    class WithLocalInput(cls):
        def forward(self, x, *args, **kwargs):
            local = _share_of(x, x.ndim - 1, next(iter(self.sharding.local.values())), self.sharding.axis)
            linears = [child for child in self.children() if isinstance(child, ColumnOfPartLinear)]
            kwargs = {name: _copied(value, self.sharding.axis) for name, value in kwargs.items()}
            for linear in linears:
                linear.whole = local, x
            try:
                return super().forward(local, *args, **kwargs)
            finally:
                for linear in linears:
                    linear.whole = None

    return WithLocalInput


class ShardedRMSNorm(nn.Module):
    """RMSNorm over a dim that is sharded (q and k normalised across all heads): one all-reduce of one float a row.

    Stands in for `torch.nn.RMSNorm` and for diffusers' `RMSNorm`; everything is in float32 up to the last rounding.
    """

    sharding: Sharding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        full = self.sharding.shapes["weight"][-1]
        squares = sum_over_axis(x.float().pow(2).sum(-1, keepdim=True), self.sharding.axis)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        normed = (x.float() * torch.rsqrt(squares / full + eps) * self.weight.float()).to(self.weight.dtype)
        bias = getattr(self, "bias", None)
        return normed if bias is None else normed + bias


class ShardedLayerNorm(nn.Module):
    """LayerNorm over a dim that is sharded: one gather of a mean and a variance a row, in float32."""

    sharding: Sharding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        axis, shard = self.sharding.axis, self.sharding.shards["weight"]
        variance, mean = torch.var_mean(x.float(), -1, correction=0)
        parts = gather_from_axis(torch.stack([mean, variance], -1), (2,) * axis.size, axis)
        means, variances = copy_to_axis(parts, axis).unflatten(-1, (axis.size, 2)).unbind(-1)
        share = torch.tensor(shard.sizes(axis.size), dtype=means.dtype, device=x.device) / sum(shard.sizes(axis.size))
        mean = (means * share).sum(-1, keepdim=True)
        variance = ((variances + (means - mean).square()) * share).sum(-1, keepdim=True)
        normed = (x.float() - mean) * torch.rsqrt(variance + self.eps) * self.weight.float()
        return (normed if self.bias is None else normed + self.bias.float()).to(x.dtype)


def across_heads(cls: type[nn.Module]) -> type[nn.Module]:
    """The sharded form of a norm over all heads."""
    return ShardedLayerNorm if cls is nn.LayerNorm else ShardedRMSNorm


class ShardedFluxIPAdapterAttnProcessor(FluxIPAdapterAttnProcessor):
    """The processor over this rank's heads. No row projection follows the image prompt's attention: it is gathered."""

    sharding: Sharding

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, *args, ip_hidden_states=None, **kwargs):
        if encoder_hidden_states is None:
            return super().__call__(attn, hidden_states, None, *args, ip_hidden_states=ip_hidden_states, **kwargs)
        # With no image prompts the parent answers zeros for them, of the gathered shape.
        hidden, encoder, prompted = super().__call__(
            attn, hidden_states, encoder_hidden_states, *args, ip_hidden_states=[], **kwargs
        )
        axis = self.sharding.axis
        sizes = self.to_k_ip[0].sharding.shards["weight"].sizes(axis.size)
        query = attn.norm_q(attn.to_q(hidden_states).unflatten(-1, (attn.heads, -1)))
        for tokens, scale, to_k, to_v in zip(ip_hidden_states, self.scale, self.to_k_ip, self.to_v_ip, strict=True):
            key, value = (project(tokens).unflatten(-1, (attn.heads, -1)).flatten(1, -3) for project in (to_k, to_v))
            out = dispatch_attention_fn(
                query, key, value, backend=self._attention_backend, parallel_config=self._parallel_config
            )
            prompted = prompted + scale * gather_from_axis(out.flatten(2).to(query.dtype), sizes, axis)
        return hidden, encoder, prompted
