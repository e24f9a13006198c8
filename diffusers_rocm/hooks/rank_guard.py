"""Ranks that share a model must feed it the same inputs; what one rank alone changed would be noise on all."""

import functools
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..distributed.axis import Axis
from ..distributed.collectives import all_gather_int64, broadcast_from_first


class SynchronisedInputs:
    """Gives every rank of the axis the first rank's inputs at each forward: latents, timestep, embeddings, guidance.

    Raises:
        ValueError: at the first forward of a run, where the ranks' inputs differ in shape or dtype.
    """

    def __init__(self, model: nn.Module, axis: Axis):
        self._axis, self._name = axis, type(model).__name__
        self.unchecked = True
        # Before any hook that gives each rank its own part of them.
        self._hook = model.register_forward_pre_hook(self._synchronise, with_kwargs=True, prepend=True)

    def remove(self) -> None:
        self._hook.remove()

    def _synchronise(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        # Once a run, on all ranks alike: `unchecked` is set by what every rank does, never by what one sees.
        if not torch.compiler.is_compiling() and self.unchecked:
            crc = torch.tensor([zlib.crc32(repr(list(_shapes((args, kwargs)))).encode())])
            if len(all_gather_int64(crc, self._axis).unique()) > 1:
                shapes = ", ".join(f"{shape}" for _, shape, _ in _shapes((args, kwargs)))
                raise ValueError(
                    f"the ranks feed {self._name} inputs of different shapes or dtypes (this rank: {shapes}); give "
                    "every rank as many prompts, of the same padded length, with the same guidance"
                )
            self.unchecked = False
        return broadcast_from_first((args, kwargs), self._axis)


def _shapes(value: Any, name: str = "") -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    if isinstance(value, torch.Tensor):
        yield name, tuple(value.shape), value.dtype
    elif isinstance(value, dict):
        for key in value:
            yield from _shapes(value[key], f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _shapes(item, f"{name}.{index}")


class SynchronisedScheduler:
    """Gives every rank of the axis the first rank's schedule (timesteps, sigmas) and latents after each step.

    One scheduler may serve several pipelines: it is itself again when the last of these is removed.
    """

    def __init__(self, scheduler: Any, axis: Axis, inputs: Sequence[SynchronisedInputs] = ()):
        self._scheduler, self.axis, self.inputs = scheduler, axis, inputs
        users = vars(scheduler).setdefault("synchronised", [])
        if not users:
            scheduler.__class__ = _synchronised_class(type(scheduler))
        users.append(self)

    def __deepcopy__(self, memo: dict) -> "SynchronisedScheduler":
        return self  # a copied scheduler is on the same ranks

    def remove(self) -> None:
        users = self._scheduler.synchronised
        users.remove(self)
        if not users:
            del self._scheduler.synchronised
            self._scheduler.__class__ = type(self._scheduler).__base__


@functools.cache
def _synchronised_class(cls: type) -> type:
    class Synchronised(cls):
        @functools.wraps(cls.set_timesteps)  # pipelines look at the signature
        def set_timesteps(self, *args, **kwargs) -> None:
            super().set_timesteps(*args, **kwargs)
            axis = self.synchronised[0].axis
            counts = all_gather_int64(torch.tensor([len(self.timesteps)]), axis).flatten().tolist()
            if len(set(counts)) > 1:
                raise ValueError(f"the ranks were asked for different numbers of steps: {counts}")
            for name in ("timesteps", "sigmas"):
                if isinstance(getattr(self, name, None), torch.Tensor):
                    setattr(self, name, broadcast_from_first(getattr(self, name), axis))
            for user in self.synchronised:
                for inputs in user.inputs:
                    inputs.unchecked = True

        @functools.wraps(cls.step)
        def step(self, *args, **kwargs):
            output, axis = super().step(*args, **kwargs), self.synchronised[0].axis
            if isinstance(output, tuple):
                return broadcast_from_first(output[0], axis), *output[1:]
            output.prev_sample = broadcast_from_first(output.prev_sample, axis)
            return output

    Synchronised.__name__, Synchronised.__qualname__ = cls.__name__, cls.__qualname__
    return Synchronised
