"""Ranks that share a model must feed it the same inputs; what one rank alone changed would be noise on all."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..distributed.axis import Axis
from ..distributed.collectives import all_gather_int64, broadcast_from_first


def synchronise_inputs(model: nn.Module, axis: Axis) -> RemovableHandle:
    """Give every rank of the axis the first rank's inputs at each forward: latents, timestep, embeddings, guidance."""

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return broadcast_from_first((args, kwargs), axis)

    return model.register_forward_pre_hook(hook, with_kwargs=True)


class SynchronisedScheduler:
    """Give every rank of the axis the first rank's schedule (timesteps, sigmas) and latents after each step.

    Wraps two methods of one scheduler object, until `remove()`.
    """

    def __init__(self, scheduler: Any, axis: Axis):
        self._scheduler, self._axis = scheduler, axis
        scheduler.set_timesteps = self._wrap_set_timesteps(scheduler.set_timesteps)
        scheduler.step = self._wrap_step(scheduler.step)

    def remove(self) -> None:
        del self._scheduler.set_timesteps, self._scheduler.step

    def _wrap_set_timesteps(self, original: Callable) -> Callable:
        @functools.wraps(original)  # pipelines look at the signature
        def set_timesteps(*args, **kwargs) -> None:
            original(*args, **kwargs)
            counts = all_gather_int64(torch.tensor([len(self._scheduler.timesteps)]), self._axis).flatten().tolist()
            if len(set(counts)) > 1:
                raise ValueError(f"the ranks were asked for different numbers of steps: {counts}")
            for name in ("timesteps", "sigmas"):
                if isinstance(getattr(self._scheduler, name, None), torch.Tensor):
                    setattr(self._scheduler, name, broadcast_from_first(getattr(self._scheduler, name), self._axis))

        return set_timesteps

    def _wrap_step(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def step(*args, **kwargs):
            output = original(*args, **kwargs)
            if isinstance(output, tuple):
                return broadcast_from_first(output[0], self._axis), *output[1:]
            output.prev_sample = broadcast_from_first(output.prev_sample, self._axis)
            return output

        return step
