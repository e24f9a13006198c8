"""The modulation of all blocks, computed once a step with one gather.

Adaptive layer norms turn the step's embedding into shifts, scales and gates with one Linear a block: over a quarter of
FLUX.1's weights, for one row of output each. Sharded, each of them would gather a few kilobytes, 77 times a step, and
every gather is a round of latency. But all of them have the same input, SiLU(embedding), known before the first block
runs: so they are computed there, together, and each Linear's forward finds its answer ready.
"""

import torch
import torch.nn.functional as F
from torch import nn

from ..distributed.collectives import all_gather_stacked
from .group_offload import is_offloaded
from .tensor_parallel_layers import ModulationLinear


class StepModulation:
    """Hooks that compute the modulation of a model when `source`, which makes the step's embedding, has run.

    The Linears take SiLU of it, or it as it is if `activated`.
    """

    def __init__(self, model: nn.Module, source: nn.Module, activated: bool = False):
        self._activated = activated
        self._linears = [module for module in model.modules() if isinstance(module, ModulationLinear)]
        path = next(path for path, module in model.named_modules() if module is self._linears[0]).split(".")
        self._around = [model.get_submodule(".".join(path[:count])) for count in range(len(path) + 1)]
        self._axis = axis = self._linears[0].sharding.axis
        sizes = [linear.sharding.shards["weight"].sizes(axis.size) for linear in self._linears]
        self._features = [sum(by_rank) for by_rank in sizes]
        self._longest = max(sum(of_rank) for of_rank in zip(*sizes, strict=True))
        # Where in the gathered rows, one after another, each Linear's features are: rank by rank, in their order.
        offsets, order = [rank * self._longest for rank in range(axis.size)], []
        for by_rank in sizes:
            for rank, size in enumerate(by_rank):
                order.append(torch.arange(offsets[rank], offsets[rank] + size, dtype=torch.int32))
                offsets[rank] += size
        # A buffer, so that it moves with the model.
        self.source = source
        source.register_buffer(
            "modulation_order", torch.cat(order).to(self._linears[0].weight.device), persistent=False
        )
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
        for_each_token = embedding.shape[:-1].numel() > len(embedding)  # all Linears' outputs together would be large
        if torch.is_grad_enabled() or unready or for_each_token or not self._in_forward:
            return
        if self._linears[0].ready is not None:  # the second embedding of a step: each Linear sees which it is given
            self._end()
            return
        x = embedding if self._activated else F.silu(embedding)
        local = torch.cat([F.linear(x, linear.weight, linear.bias) for linear in self._linears], dim=-1)
        stacked = all_gather_stacked(F.pad(local, (0, self._longest - local.shape[-1])), self._axis)
        gathered = stacked.movedim(0, -2).flatten(-2).index_select(-1, source.modulation_order)
        for linear, output in zip(self._linears, gathered.split(self._features, dim=-1), strict=True):
            linear.ready = output.contiguous()  # as a Linear's own output is: models take views of it
