"""Ranks that share a picture must compute with the same inputs; what one rank alone changed would be noise on all.

Before the first step, inputs and schedule are compared by one small exchange. After each step every rank goes on from
the first one's latents, so that what the ranks round differently does not add up.
"""

import functools
import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..distributed import name_ranks
from ..distributed.agreement import FEW, agree, leaves
from ..distributed.axis import Axis
from ..distributed.collectives import all_gather, broadcast_from_first
from .around_call import AroundCall
from .stand_in import stands_in_for


# Ranks tell each other after the first step, and then every so many, whether their latents were finite.
STEPS_BETWEEN_LOOKS = 4

RANK_CHECKS = ("first", "always", "off")


class InRun(Protocol):
    """What a scheduler tells of a run."""

    def begin_run(self) -> None: ...

    def end_step(self) -> None: ...


class InputGuard(AroundCall):
    """Compares what the ranks feed a denoiser, in the first step of a run or, if `always`, in each.

    Where inputs differ by rounding, all ranks take the first one's.

    Raises:
        ValueError: they differ by more.
    """

    def __init__(self, model: nn.Module, axis: Axis, always: bool = False):
        super().__init__(model)
        self._name, self._axis, self._always = type(model).__name__, axis, always
        # Of the class: what caches put in the place of the model's forward does not always tell them.
        _, *self._parameters = inspect.signature(type(model).forward).parameters
        self.begin_run()

    def begin_run(self) -> None:
        self._due, self._rounded = True, False

    def end_step(self) -> None:
        self._due = self._always

    def around(self, call: Any, args: tuple, kwargs: dict) -> Any:
        if self._due:
            named = dict(zip(self._parameters, args, strict=False)) | kwargs
            self._rounded |= not agree(f"inputs to {self._name}", dict(leaves(named)), self._axis)
        if self._rounded:
            args, kwargs = broadcast_from_first((args, kwargs), self._axis)
        return call(*args, **kwargs)


class GuardedScheduler:
    """A scheduler whose schedule is compared, whose steps are checked, and whose latents are the first rank's.

    One scheduler may serve several pipelines: it is itself again when the last of these is removed.

    Args:
        listeners: are told of each run and step.
        check: whether the schedule is compared, and each step's latents are looked at for NaN and inf.
    """

    def __init__(self, scheduler: Any, axis: Axis, listeners: Sequence[InRun] = (), check: bool = True):
        self._scheduler, self.axis, self.listeners, self.check = scheduler, axis, listeners, check
        self._count = 0
        self._flags: list[Tensor] = []  # of steps that the other ranks were not told of
        self._sent: list[tuple[int, Tensor, torch.Event | None]] = []  # the first step, and flags not read yet
        users = vars(scheduler).setdefault("guards", [])
        if not users:
            scheduler.__class__ = _guarded_class(type(scheduler))
        users.append(self)

    def __deepcopy__(self, memo: dict) -> "GuardedScheduler":
        return self  # a copied scheduler is on the same ranks

    def remove(self) -> None:
        users = self._scheduler.guards
        users.remove(self)
        if not users:
            del self._scheduler.guards
            self._scheduler.__class__ = type(self._scheduler).__base__

    def begin_run(self, scheduler: Any) -> None:
        self._count, self._flags, self._sent = 0, [], []
        if self.check:
            given = {name: getattr(scheduler, name, None) for name in ("timesteps", "sigmas")}
            # In parts that are few numbers, which must be equal: of many, some rounding is allowed.
            schedule = {
                f"{name}[{FEW * index}:]" if index else name: part
                for name, numbers in given.items()
                for index, part in enumerate(torch.as_tensor(numbers).split(FEW) if numbers is not None else ())
            }
            agree("schedules", {"the number of steps": len(scheduler.timesteps)} | schedule, self.axis)
        for listener in self.listeners:
            listener.begin_run()

    def end_step(self, scheduler: Any, latents: Tensor) -> Tensor:
        for listener in self.listeners:
            listener.end_step()
        if self.check:
            self._flags.append(torch.isfinite(latents).all())
            self._count += 1
            last = self._count >= len(scheduler.timesteps)
            if last or self._count == 1 or len(self._flags) == STEPS_BETWEEN_LOOKS:
                self._send()
            while self._sent and (last or self._sent[0][2] is None or len(self._sent) > 1):
                self._look(*self._sent.pop(0))
        return broadcast_from_first(latents, self.axis)

    def _send(self) -> None:
        flags, count = torch.stack(self._flags).to(torch.uint8), len(self._flags)
        by_rank, arrived = all_gather(flags, (count,) * self.axis.size, self.axis), None
        if by_rank.device.type != "cpu":
            # A device is not waited for: what was wrong is said when the next flags are sent.
            by_rank = torch.empty(by_rank.shape, dtype=torch.uint8, pin_memory=True).copy_(by_rank, non_blocking=True)
            arrived = torch.get_device_module(flags.device).current_stream(flags.device).record_event()
        self._sent.append((self._count - count, by_rank.view(self.axis.size, count), arrived))
        self._flags = []

    def _look(self, first: int, by_rank: Tensor, arrived: torch.Event | None) -> None:
        if arrived is not None:
            arrived.synchronize()
        ranks = dist.get_process_group_ranks(self.axis.group) if self.axis.group else [0]
        for step, finite in enumerate(by_rank.T.tolist(), first):
            wrong = [rank for rank, fine in zip(ranks, finite, strict=True) if not fine]
            if wrong:
                raise FloatingPointError(f"step {step}: NaN or inf in the latents of {name_ranks(wrong)}")


@functools.cache
def _guarded_class(cls: type) -> type:
    @stands_in_for(cls)
    class Guarded(cls):
        @functools.wraps(cls.set_timesteps)  # pipelines look at the signature
        def set_timesteps(self, *args, **kwargs) -> None:
            super().set_timesteps(*args, **kwargs)
            for guard in self.guards:
                guard.begin_run(self)

        @functools.wraps(cls.step)
        def step(self, *args, **kwargs):
            output = super().step(*args, **kwargs)
            latents = output[0] if isinstance(output, tuple) else output.prev_sample
            for guard in self.guards:
                latents = guard.end_step(self, latents)
            if isinstance(output, tuple):
                return latents, *output[1:]
            output.prev_sample = latents
            return output

    return Guarded
