"""What each collective of a model's step takes on this machine's links, at the size that the model sends."""

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ..distributed import init
from ..distributed.axis import Axis
from ..distributed.collectives import all_gather_int64
from ..models._modeling_parallel import ParallelConfig
from .collective_calls import collective_calls
from .known_models import KNOWN_MODELS, build, inputs
from .step import Clock, StepRequest, parse_mesh


# In a row, so that the launch of one hides under the one before, as it does in a model.
IN_A_ROW = 10


@dataclass
class Collective:
    """Calls of one kind and size.

    Attributes:
        sent: bytes that each rank gives away.
        calls: in a step.
        microseconds: of one, in each repeat.
    """

    name: str
    sent: list[int]
    calls: int
    microseconds: list[float]

    @property
    def median(self) -> float:
        """Microseconds of one."""
        return statistics.median(self.microseconds)

    @property
    def gigabytes_a_second(self) -> float:
        """Of what the rank with the most gives; over the wire it is another amount, by the kind of collective."""
        return max(self.sent) / self.median / 1e3

    @property
    def milliseconds_a_step(self) -> float:
        return self.calls * self.median / 1e3


@dataclass
class _Call:
    """One that was made, with what it was given; of tensors no more than their shapes is kept."""

    name: str
    sent: int
    original: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]

    def again(self, device: torch.device) -> Callable[[], Any]:
        """How to make it again, in buffers of its own."""
        args = [torch.zeros_like(x, device=device) if isinstance(x, Tensor) else x for x in self.args]
        return functools.partial(self.original, *args, **self.kwargs)


@torch.no_grad()
def measure_comm(request: StepRequest) -> list[Collective]:
    """The collectives of one eager forward, those that take the most of a step first; every rank calls it.

    Raises:
        ValueError: the model cannot be had so.
    """
    device = init(request.device, timeout=timedelta(minutes=10))
    dtype, known, world = getattr(torch, request.dtype), KNOWN_MODELS[request.model], Axis.of_all()
    model = build(known, request.config, device, dtype)
    given = inputs(known, request.size, model, dtype)
    model.enable_parallelism(config=ParallelConfig(**parse_mesh(request.meshes[0])))
    model(**given)  # what is exchanged once, in the first forward
    calls: list[_Call] = []

    def record(name: str, sent: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        shapes = [torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x for x in args]
        quietly = {key: value for key, value in kwargs.items() if key != "async_op"}
        calls.append(_Call(name, sent, original, shapes, quietly))
        return original(*args, **kwargs)

    with collective_calls(record):
        model(**given)
    # Ranks send unevenly; which calls are alike must be the same for all.
    sent = all_gather_int64(torch.tensor([call.sent for call in calls], dtype=torch.int64), world).T.tolist()
    alike: dict[tuple, list[_Call]] = {}
    for call, row in zip(calls, sent, strict=True):
        alike.setdefault((call.name, *row), []).append(call)
    found, clock = [], Clock(device)
    for (name, *row), same in alike.items():
        one = same[0].again(device)

        def in_a_row(again: Callable[[], Any] = one) -> None:
            for _ in range(IN_A_ROW):
                again()

        in_a_row()
        times = [clock.milliseconds(in_a_row) * 1e3 / IN_A_ROW for _ in range(request.repeats)]
        found.append(Collective(name, row, len(same), times))
    return sorted(found, key=lambda each: -each.milliseconds_a_step)


def comm_table(found: list[Collective]) -> str:
    """One line for each kind and size, then their sum."""
    lines = [
        f"{'':12}{'MB a rank':>12}{'calls a step':>14}{'us each':>10}{'(least to most)':>20}{'GB/s':>8}"
        f"{'ms a step':>11}"
    ]
    for each in found:
        size = f"{max(each.sent) / 1e6:.3f}"
        least = f"({min(each.microseconds):.1f} to {max(each.microseconds):.1f})"
        lines.append(
            f"{each.name:12}{size:>12}{each.calls:>14}{each.median:>10.1f}{least:>20}{each.gigabytes_a_second:>8.2f}"
            f"{each.milliseconds_a_step:>11.3f}"
        )
    total = sum(each.milliseconds_a_step for each in found)
    lines.append(f"{'all of them':12}{'':12}{sum(each.calls for each in found):>14}{'':38}{total:>11.3f}")
    return "\n".join(lines)
