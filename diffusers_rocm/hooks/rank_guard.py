"""Ranks that share a picture must compute with the same inputs; what one rank alone changed would be noise on all.

Before the first step, inputs and schedule are compared by one small exchange. After each step every rank goes on from
the first one's latents, so that what the ranks round differently does not add up.
"""

import contextlib
import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..distributed import name_ranks
from ..distributed.agreement import FEW, agree, leaves
from ..distributed.axis import Axis
from ..distributed.collectives import all_gather, broadcast_from_first
from .around_call import AroundCall
from .stand_in import stands_in_for


# Ranks tell each other after the first step, and then every so many, whether their latents were finite.
STEPS_BETWEEN_LOOKS = 4


class InRun(Protocol):
    """What a scheduler tells of a run."""

    def begin_run(self) -> None: ...

    def end_step(self) -> None: ...


class InputGuard(AroundCall):
    """Compares what the ranks feed a denoiser, in the first step of a run or, if `always`, in each.

    Outside of a parallel pipeline's call nothing tells of runs, and every call is compared. Where inputs differ by
    rounding, all ranks take the first one's.

    Raises:
        ValueError: they differ by more.
    """

    def __init__(self, model: nn.Module, axis: Axis, always: bool = False):
        super().__init__(model)
        self._name, self._axis, self._always = type(model).__name__, axis, always
        self.in_pipeline = False
        # Of the class: what caches put in the place of the model's forward does not always tell them.
        _, *self._parameters = inspect.signature(type(model).forward).parameters
        self.begin_run()

    def begin_run(self) -> None:
        self._due, self._rounded = True, False

    def end_step(self) -> None:
        self._due = self._always

    def around(self, call: Any, args: tuple, kwargs: dict) -> Any:
        if self._due or not self.in_pipeline:
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
        check: whether the schedule is compared, and each step's latents are looked at for NaN and inf: in the first
            step, in every fourth, and when the run ends.
    """

    def __init__(self, scheduler: Any, axis: Axis, listeners: Sequence[InRun] = (), check: bool = True):
        self.axis, self.listeners, self.check = axis, listeners, check
        self._hang_on(scheduler)

    def _hang_on(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._forget()
        users = vars(scheduler).setdefault("guards", [])
        if not users:
            scheduler.__class__ = _guarded_class(type(scheduler))
        if self not in users:  # as it is in those of a copy
            users.append(self)

    def follow(self, scheduler: Any) -> None:
        """Be on this scheduler, which a pipeline has now, if not already."""
        if scheduler is not self._scheduler:
            self.remove()
            self._hang_on(scheduler)

    def __deepcopy__(self, memo: dict) -> "GuardedScheduler":
        return self  # a copied scheduler is on the same ranks

    def remove(self) -> None:
        users = self._scheduler.guards
        users.remove(self)
        if not users:
            del self._scheduler.guards
            self._scheduler.__class__ = type(self._scheduler).__base__

    def _forget(self) -> None:
        self._counts: dict[int, int] = {}  # of the steps of each scheduler: pipelines with sound have a copy for it
        self._flags: list[tuple[int, Tensor]] = []  # of steps that the other ranks were not told of
        self._sent: list[tuple[list[int], Tensor, torch.Event | None]] = []  # steps, and flags not read yet

    def begin_run(self, scheduler: Any) -> None:
        self._forget()
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
            step = self._counts.get(id(scheduler), 0)
            self._counts[id(scheduler)] = step + 1
            self._flags.append((step, (latents * 0).sum()))  # NaN unless all are finite
            if step == 0 or len(self._flags) == STEPS_BETWEEN_LOOKS:
                self._send()
            # A device is not waited for: what was wrong is said when the next flags were sent.
            while self._sent and (self._sent[0][2] is None or len(self._sent) > 1):
                self._look(*self._sent.pop(0))
        return broadcast_from_first(latents, self.axis)

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """What runs inside is the call of a pipeline with this scheduler."""
        inputs = [each for each in self.listeners if isinstance(each, InputGuard)]
        for each in inputs:
            each.in_pipeline = True
        try:
            yield
            self._end_run()
        finally:
            for each in inputs:
                each.in_pipeline = False

    def _end_run(self) -> None:
        """Look at the steps that nobody looked at yet: all ranks that share a picture call it when it is done."""
        if self._flags:
            self._send()
        while self._sent:
            self._look(*self._sent.pop(0))
        self._forget()

    def _send(self) -> None:
        steps, flags = zip(*self._flags, strict=True)
        flags, count = torch.stack(flags).isnan().to(torch.uint8), len(flags)
        by_rank, arrived = all_gather(flags, (count,) * self.axis.size, self.axis), None
        if by_rank.device.type != "cpu":
            by_rank = torch.empty(by_rank.shape, dtype=torch.uint8, pin_memory=True).copy_(by_rank, non_blocking=True)
            arrived = torch.get_device_module(flags.device).current_stream(flags.device).record_event()
        self._sent.append((list(steps), by_rank.view(self.axis.size, count), arrived))
        self._flags = []

    def _look(self, steps: list[int], by_rank: Tensor, arrived: torch.Event | None) -> None:
        if arrived is not None:
            arrived.synchronize()
        ranks = self.axis.ranks()
        for step, flags in zip(steps, by_rank.T.tolist(), strict=True):
            wrong = [rank for rank, flag in zip(ranks, flags, strict=True) if flag]
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
