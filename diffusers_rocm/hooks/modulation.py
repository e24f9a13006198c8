"""The modulation of all blocks in one product a step and one gather.

Adaptive layer norms turn the step's embedding into shifts, scales and gates with one Linear a block: over a quarter of
FLUX.1's weights, for one row of output each. Sharded, each of them would gather a few kilobytes, 77 times a step, and
every gather is a round of latency. But all of them have the same input, SiLU(embedding), known before the first block
runs: so they are computed there, together, and each Linear's forward finds its answer ready.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..distributed.collectives import all_gather_stacked
from .tensor_parallel_layers import ModulationLinear


class _StepModulation:
    def __init__(self, linears: Sequence[ModulationLinear]):
        self.linears = linears
        axis, shards = linears[0].sharding.axis, [linear.sharding.shards["weight"] for linear in linears]
        sizes = [[shard.size(rank, axis.size) for rank in range(axis.size)] for shard in shards]
        longest = max(sum(by_rank) for by_rank in zip(*sizes, strict=True))
        # Where in the gathered rows, one after another, each Linear's features are: rank by rank, in their order.
        offsets = [rank * longest for rank in range(axis.size)]
        order = []
        for by_rank in sizes:
            for rank, size in enumerate(by_rank):
                order.append(torch.arange(offsets[rank], offsets[rank] + size, dtype=torch.int32))
                offsets[rank] += size
        self.axis, self.longest, self.order = axis, longest, torch.cat(order)
        self.features = [sum(by_rank) for by_rank in sizes]

    def compute(self, module: nn.Module, args: tuple, embedding: torch.Tensor) -> None:
        """Forward hook of the module that makes the embedding [B, D]."""
        # With gradients, or with weights that offloading brings in block by block, each Linear computes its own.
        if torch.is_grad_enabled() or any(linear.weight.device != embedding.device for linear in self.linears):
            return
        x = F.silu(embedding)
        local = torch.cat([F.linear(x, linear.weight, linear.bias) for linear in self.linears], dim=-1)
        stacked = all_gather_stacked(F.pad(local, (0, self.longest - local.shape[-1])), self.axis)
        if self.order.device != x.device:
            self.order = self.order.to(x.device)
        gathered = stacked.transpose(0, 1).flatten(1).index_select(1, self.order)
        for linear, output in zip(self.linears, gathered.split(self.features, dim=-1), strict=True):
            linear.ready = output

    def clear(self, *_) -> None:
        """Forward hook of the model: an answer is good for the step that it was computed in."""
        for linear in self.linears:
            linear.ready = None


def compute_modulation_once(model: nn.Module, source: nn.Module) -> list[RemovableHandle]:
    """Hooks that compute the modulation of `model` when `source`, which makes the step's embedding, has run."""
    linears = [module for module in model.modules() if isinstance(module, ModulationLinear)]
    step = _StepModulation(linears)
    return [
        source.register_forward_hook(step.compute),
        model.register_forward_hook(step.clear, always_call=True),
    ]
