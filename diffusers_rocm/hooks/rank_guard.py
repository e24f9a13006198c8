"""Ranks that share a model must feed it the same inputs; what one rank alone changed would be noise on all."""

from torch import nn
from torch.utils.hooks import RemovableHandle

from ..distributed.axis import Axis
from ..distributed.collectives import broadcast_from_first


def synchronise_inputs(model: nn.Module, axis: Axis) -> RemovableHandle:
    """Give every rank of the axis the first rank's inputs at each forward: latents, timestep, embeddings, guidance."""

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return broadcast_from_first((args, kwargs), axis)

    return model.register_forward_pre_hook(hook, with_kwargs=True)
