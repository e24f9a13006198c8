"""Ranks that share a picture must compute with the same inputs; what one rank alone changed would be noise on all.

Before the first step, inputs and schedule are compared by one small exchange. After each step every rank goes on from
the first one's latents, so that what the ranks round differently does not add up.
"""

import functools
import inspect
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..distributed.axis import Axis
from ..distributed.collectives import all_gather, all_gather_int64, all_gather_text, broadcast_from_first
from .around_call import AroundCall
from .weight_agreement import fingerprint


RANK_CHECKS = ("first", "always", "off")

# Two GPUs, or two libraries, may round the same embeddings so differently (relative L2); another prompt is at 0.3 and
# more. What has few elements (timesteps, guidance) is not computed, and must be equal.
ROUNDING, FEW = 0.03, 64


class InRun(Protocol):
    """What a scheduler tells of a run."""

    def begin_run(self) -> None: ...

    def end_step(self) -> None: ...


def agree(what: str, values: Mapping[str, Any], axis: Axis) -> bool:
    """Are the values the same on all ranks of the axis, but for rounding? One exchange of 8 bytes if they are.

    Returns:
        Whether all tensors are bit-equal; the answer is the same on all ranks.

    Raises:
        ValueError: they are not the same; names what differs, the ranks and some of their values, on every rank.
    """
    tensors = {name: x.detach() for name, x in values.items() if isinstance(x, Tensor)}
    others = {name: repr(x) for name, x in values.items() if not isinstance(x, Tensor)}
    prints = torch.stack([fingerprint(x).cpu() for x in tensors.values()]).tolist() if tensors else []
    shapes = [(name, tuple(x.shape), x.dtype) for name, x in tensors.items()]
    digest = zlib.crc32(repr((shapes, prints, others)).encode())
    if len(all_gather_int64(torch.tensor([digest]), axis).unique()) == 1:
        return True
    described = {name: _describe(x, number) for (name, x), number in zip(tensors.items(), prints, strict=True)}
    by_rank = [json.loads(text) for text in all_gather_text(json.dumps(described | others), axis)]
    for name in dict.fromkeys(name for each in by_rank for name in each):
        seen = [each.get(name, "nothing") for each in by_rank]
        if any(not _same(seen[0], other) for other in seen[1:]):
            raise ValueError(f"the ranks were given different {what}: {name} is {_by_ranks(seen, axis)}")
    return False


def _describe(x: Tensor, number: int) -> dict[str, Any]:
    values = (torch.view_as_real(x) if x.is_complex() else x).flatten().double().cpu()
    signs = torch.Generator().manual_seed(0)
    # Random projections tell how far apart two tensors are (Johnson and Lindenstrauss, 1984).
    sketch = [torch.randn(values.numel(), generator=signs, dtype=torch.double) @ values for _ in range(8)]
    return {
        "kind": f"{[*x.shape]} {str(x.dtype).removeprefix('torch.')}",
        "print": number,
        "few": not x.is_floating_point() or x.numel() <= FEW,
        "norm": values.norm().item(),
        "sketch": [each.item() for each in sketch],
        "sample": ", ".join(f"{value:.6g}" for value in values[:4].tolist()) + (", ..." if values.numel() > 4 else ""),
    }


def _same(a: Any, b: Any) -> bool:
    """Equal, or equal but for rounding."""
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return a == b
    if a["kind"] != b["kind"] or a["print"] == b["print"] or a["few"]:
        return a["kind"] == b["kind"] and a["print"] == b["print"]
    distance = math.sqrt(sum((x - y) ** 2 for x, y in zip(a["sketch"], b["sketch"], strict=True)) / len(a["sketch"]))
    return distance <= ROUNDING * a["norm"]


def _by_ranks(seen: Sequence[Any], axis: Axis) -> str:
    """`0.5 on rank 0 and 0.25 on ranks 1, 2`"""
    groups: dict[str, list[int]] = {}
    for rank, each in zip(dist.get_process_group_ranks(axis.group), seen, strict=True):
        if isinstance(each, dict):
            each = f"{each['kind']} ({each['sample']}; norm {each['norm']:.6g})"
        groups.setdefault(each, []).append(rank)
    shown = [f"{each} on rank{'s' * (len(on) > 1)} {', '.join(map(str, on))}" for each, on in groups.items()]
    return " and ".join(shown)


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
            self._rounded |= not agree(f"inputs to {self._name}", dict(_leaves(named)), self._axis)
        if self._rounded:
            args, kwargs = broadcast_from_first((args, kwargs), self._axis)
        return call(*args, **kwargs)


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key in value:
            yield from _leaves(value[key], f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{name}.{index}")
    else:
        yield name, value


class GuardedScheduler:
    """A scheduler whose schedule is compared, whose steps are checked, and whose latents are the first rank's.

    One scheduler may serve several pipelines: it is itself again when the last of these is removed.

    Args:
        listeners: are told of each run and step.
        check: whether the schedule is compared, and each step's latents are looked at for NaN and inf.
    """

    def __init__(self, scheduler: Any, axis: Axis, listeners: Sequence[InRun] = (), check: bool = True):
        self._scheduler, self.axis, self.listeners, self.check = scheduler, axis, listeners, check
        self._steps: list[tuple[int, Tensor]] = []  # whose flags were not read yet
        self._count = 0
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
        self._steps, self._count = [], 0
        if self.check:
            counts = all_gather_int64(torch.tensor([len(scheduler.timesteps)]), self.axis).flatten().tolist()
            if len(set(counts)) > 1:
                raise ValueError(f"the ranks were asked for different numbers of steps: {counts}")
            schedule = {name: getattr(scheduler, name, None) for name in ("timesteps", "sigmas")}
            agree("schedules", schedule, self.axis)
        for listener in self.listeners:
            listener.begin_run()

    def end_step(self, scheduler: Any, latents: Tensor) -> Tensor:
        for listener in self.listeners:
            listener.end_step()
        if self.check:
            finite = torch.isfinite(latents).all().to(torch.uint8)[None]
            flags = all_gather(finite, (1,) * self.axis.size, self.axis)
            self._steps.append((self._count, flags))
            self._count += 1
            # A device is not waited for: it says in the next step what was wrong in this one.
            last = self._count >= len(scheduler.timesteps)
            while len(self._steps) > (0 if last or flags.device.type == "cpu" else 1):
                self._look(*self._steps.pop(0))
        return broadcast_from_first(latents, self.axis)

    def _look(self, step: int, finite: Tensor) -> None:
        ranks = dist.get_process_group_ranks(self.axis.group) if self.axis.group else [0]
        wrong = [rank for rank, fine in zip(ranks, finite.tolist(), strict=True) if not fine]
        if wrong:
            raise FloatingPointError(
                f"step {step}: NaN or inf in the latents of rank{'s' * (len(wrong) > 1)} {', '.join(map(str, wrong))}"
            )


@functools.cache
def _guarded_class(cls: type) -> type:
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

    Guarded.__name__, Guarded.__qualname__, Guarded.__module__ = cls.__name__, cls.__qualname__, cls.__module__
    return Guarded
