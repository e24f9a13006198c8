"""diffusers' FirstBlockCache where each rank sees its part of the sequence.

Whether a step's remaining blocks are computed follows from how far the first block's residual moved. Ranks that decide
by their own tokens decide differently, and those that go on wait in a collective for those that do not.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..distributed.axis import Axis
from ..distributed.collectives import all_reduce
from .context_parallel import split_of


def wrap_new_forward(original: Callable) -> Callable:
    """`FBCHeadBlockHook.new_forward`, which decides over all ranks where its block's attention is split."""

    @functools.wraps(original)
    def new_forward(self, module: nn.Module, *args, **kwargs):
        split = split_of(module)
        if split is not None:
            self._should_compute_remaining_blocks = functools.partial(_should_compute, self, split.cp)
        else:
            vars(self).pop("_should_compute_remaining_blocks", None)
        return original(self, module, *args, **kwargs)

    return new_forward


@torch.compiler.disable
def _should_compute(hook, cp: Axis, residual: Tensor) -> bool:
    """diffusers' ratio of mean absolute values, over the whole sequence."""
    before = hook.state_manager.get_state().head_block_residual
    if before is None:
        return True
    sums = torch.stack([(residual - before).abs().sum(dtype=torch.float32), before.abs().sum(dtype=torch.float32)])
    moved, size = all_reduce(sums, cp)
    return (moved / size).item() > hook.threshold
