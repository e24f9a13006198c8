"""The modulation of all blocks, computed once a step with one gather.

Adaptive layer norms turn the step's embedding into shifts, scales and gates with one Linear a block: over a quarter of
FLUX.1's weights, for one row of output each. Sharded, each of them would gather a few kilobytes, 77 times a step, and
every gather is a round of latency. But all of them have the same input, SiLU(embedding), known before the first block
runs: so they are computed there, together, and each Linear's forward finds its answer ready. Ranks that share a
sequence have all of the weights, or the same slices: each reads a part.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import nn

from ..distributed.collectives import all_gather_stacked
from ..distributed.mesh import Axes
from ..distributed.quantized import is_plain
from ..models.plans import get_tensor_parallel_plan
from ..models.plans.plan import TensorParallelPlan, match
from .group_offload import is_offloaded
from .tensor_parallel import base_layer, become
from .tensor_parallel_layers import ModulationLinear, ShardedModulationLinear


def share_modulation(model: nn.Module, axes: Axes) -> "list[StepModulation]":
    """Hang it on a model that has such Linears, and several ranks to a forward."""
    try:
        plan = get_tensor_parallel_plan(type(model))
    except ValueError:  # no plan
        return []
    found = [module for _, style, at in match(model, plan.rules) if style == "modulation" for _, module in at]
    linears = [linear for linear in map(base_layer, found) if type(linear) in (nn.Linear, ShardedModulationLinear)]
    if plan.embedding_path(model.config) is None or axes.model.size == 1 or not linears:
        return []
    return [StepModulation(model, plan, linears, axes)]


class StepModulation:
    """Hooks that compute the modulation of a model when the plan's `embedding` has run."""

    def __init__(self, model: nn.Module, plan: TensorParallelPlan, linears: list[nn.Linear], axes: Axes):
        self._activated, self._linears = plan.activated, linears
        for linear in linears:
            if not isinstance(linear, ModulationLinear):
                become(linear, ModulationLinear)
        path = next(path for path, module in model.named_modules() if module is linears[0]).split(".")
        self._around = [model.get_submodule(".".join(path[:count])) for count in range(len(path) + 1)]
        self._axis, self._context = axes.model, axes.context
        slices = [
            [linear.out_features] if axes.tp.size == 1 else linear.sharding.shards["weight"].sizes(axes.tp.size)
            for linear in linears
        ]
        self._features = [sum(sizes) for sizes in slices]
        # Of each slice, the ranks that have it compute a part each.
        parts = [[_parts(size, axes.context.size) for size in sizes] for sizes in slices]
        self._longest = max(
            sum(len(of[tp][context]) for of in parts)
            for tp, context in itertools.product(range(axes.tp.size), range(axes.context.size))
        )
        self._own = [slice(of.start, of.stop) for of in (of[axes.tp.rank][axes.context.rank] for of in parts)]
        # Where in the gathered rows, one after another, each Linear's features are: rank by rank, in their order.
        offsets, order = [rank * self._longest for rank in range(self._axis.size)], []
        for by_slice in parts:
            for tp, by_context in enumerate(by_slice):
                for context, part in enumerate(by_context):
                    rank = context * axes.tp.size + tp
                    order.append(torch.arange(offsets[rank], offsets[rank] + len(part), dtype=torch.int32))
                    offsets[rank] += len(part)
        # A buffer, so that it moves with the model.
        self.source = source = model.get_submodule(plan.embedding_path(model.config))
        source.register_buffer("modulation_order", torch.cat(order).to(linears[0].weight.device), persistent=False)
        self._in_forward = False
        self.handles = [
            source.register_forward_hook(self._compute),
            model.register_forward_pre_hook(self._begin),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def remove(self) -> None:
        """From here on each Linear computes and gathers its own."""
        for hook in self.handles:
            hook.remove()
        for linear in self._linears:
            if type(linear) is ModulationLinear:
                become(linear, nn.Linear)
            vars(linear).pop("ready", None)
        del self.source.modulation_order

    def follow(self, source: nn.Module) -> None:
        """The hooks were moved to another module, which stands where the source was."""
        source.register_buffer("modulation_order", self.source.modulation_order, persistent=False)
        del self.source.modulation_order
        self.source = source

    def _begin(self, *_) -> None:
        self._end()  # an interrupted forward may have left its answers
        self._in_forward = True
        if not torch.compiler.is_compiling():
            # Last among the hooks of the source: another may change what the blocks will see.
            self.source._forward_hooks.move_to_end(self.handles[0].id)

    def _end(self, *_) -> None:
        """An answer is good for the step that it was computed in."""
        self._in_forward = False
        for linear in self._linears:
            linear.ready = None

    def _compute(self, source: nn.Module, args: tuple, embedding: torch.Tensor) -> None:
        # With gradients, or with weights that offloading or layerwise casting makes ready block by block, each Linear
        # computes its own.
        like = embedding.device, embedding.dtype
        unready = any((linear.weight.device, linear.weight.dtype) != like for linear in self._linears)
        unready |= not torch.compiler.is_compiling() and any(is_offloaded(module) for module in self._around)
        # Where sequences are split, tokens are those of this rank, and their number no ground for a collective.
        unready |= self._context.size > 1 and embedding.ndim > 2
        for_each_token = embedding.shape[:-1].numel() > len(embedding)  # all Linears' outputs together would be large
        if torch.is_grad_enabled() or unready or for_each_token or not self._in_forward:
            return
        if self._linears[0].ready is not None:  # the second embedding of a step: each Linear sees which it is given
            self._end()
            return
        x = embedding if self._activated else F.silu(embedding)
        parts = [self._part_of(linear, own, x) for linear, own in zip(self._linears, self._own, strict=True)]
        local = torch.cat(parts, dim=-1)
        stacked = all_gather_stacked(F.pad(local, (0, self._longest - local.shape[-1])), self._axis)
        gathered = stacked.movedim(0, -2).flatten(-2).index_select(-1, source.modulation_order)
        for linear, output in zip(self._linears, gathered.split(self._features, dim=-1), strict=True):
            linear.ready = output.contiguous()  # as a Linear's own output is: models take views of it

    def _part_of(self, linear: nn.Linear, own: slice, x: torch.Tensor) -> torch.Tensor:
        if not is_plain(linear.weight):  # not every format can be cut
            return F.linear(x, linear.weight, linear.bias)[..., own]
        return F.linear(x, linear.weight[own], None if linear.bias is None else linear.bias[own])


def _parts(size: int, count: int) -> list[range]:
    """Even runs of `size` features."""
    return [range(size * index // count, size * (index + 1) // count) for index in range(count)]
