"""What each collective of a model's step takes on this machine's links, at the size that the model sends."""

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..distributed import init
from ..distributed.agreement import fail_together
from ..distributed.axis import Axis
from ..distributed.collectives import all_gather_int64
from ..models._modeling_parallel import ParallelConfig
from .collective_calls import collective_calls
from .distance import bar_of, distance, largest_of
from .known_models import KNOWN_MODELS, build, count_blocks, inputs
from .report import aligned
from .step import ONE, Clock, StepRequest, free, noted, parse_mesh


# In a row, so that the launch of one hides under the one before, as it does in a model.
IN_A_ROW = 10


@dataclass
class Collective:
    """Calls of one kind and size.

    Attributes:
        axis: of the mesh, over which it goes, or more than one, by their joined name (`Axes`).
        sent: bytes that each rank gives away.
        calls: in a step.
        microseconds: of one, in each repeat.
    """

    axis: str
    name: str
    sent: list[int]
    calls: int
    microseconds: list[float] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"{self.axis} {self.name}"

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

    axis: str
    name: str
    sent: int
    original: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]

    def again(self, device: torch.device) -> Callable[[], Any]:
        """How to make it again, in buffers of its own."""
        args = [torch.zeros_like(x, device=device) if isinstance(x, Tensor) else x for x in self.args]
        return functools.partial(self.original, *args, **self.kwargs)


@dataclass
class MeshComm:
    """What a mesh sends in a step.

    Attributes:
        distance: of its output from that of one rank, relative L2.
        unchecked: why there is none to compare with.
        note: why there are no collectives.
    """

    mesh: str
    distance: float | None = None
    unchecked: str = ""
    note: str = ""
    collectives: list[Collective] = field(default_factory=list)

    @property
    def milliseconds_a_step(self) -> float:
        return sum(each.milliseconds_a_step for each in self.collectives)


@torch.no_grad()
def measure_comm(request: StepRequest) -> list[MeshComm]:
    """The collectives of one eager forward by each mesh, those that take the most first; every rank calls it.

    All are gone through in each repeat, in turn from another one on.
    """
    device = init(request.device, timeout=timedelta(minutes=10))
    one, clock, wanted = MeshComm(ONE), Clock(device), None
    with noted(one, Axis.of_all()):
        wanted = _output(request, device)
    free(device)
    found = [MeshComm(mesh, unchecked=one.note and f"{ONE} is {one.note}") for mesh in request.meshes]
    timed: list[tuple[Collective, Callable[[], None]]] = []
    for each in found:
        with noted(each, Axis.of_all()):
            calls = _calls(request, each, device, wanted)
            of_mesh = [(Collective(*kind), _in_a_row(again)) for *kind, again in calls]
            each.collectives = [collective for collective, _ in of_mesh]
            timed += of_mesh
        free(device)
    for turn in range(-1, request.repeats):  # the first is not kept
        start = turn * len(timed) // request.repeats
        for collective, in_a_row in timed[start:] + timed[:start]:
            time = clock.milliseconds(in_a_row) * 1e3 / IN_A_ROW
            collective.microseconds += [time] * (turn >= 0)
    for each in found:
        each.collectives.sort(key=lambda collective: -collective.milliseconds_a_step)
    return found


def _output(request: StepRequest, device: torch.device) -> Tensor:
    """One rank's."""
    dtype, known = getattr(torch, request.dtype), KNOWN_MODELS[request.model]
    model = build(known, request.config, device, dtype)
    return tree_leaves(model(**inputs(known, request.size, model, dtype)))[0]


def _calls(
    request: StepRequest, of_mesh: MeshComm, device: torch.device, wanted: Tensor
) -> list[tuple[str, str, list[int], int, Callable[[], Any]]]:
    """Of each kind and size of collectives what `Collective` says of it, and how to make one.

    Notes how far the mesh's output is from one rank's, and whether that is too far: then there are none.

    Raises:
        ValueError: the model cannot be had so.
    """
    dtype, known, world = getattr(torch, request.dtype), KNOWN_MODELS[request.model], Axis.of_all()
    degrees = parse_mesh(of_mesh.mesh)
    config = ParallelConfig(**degrees)
    axes = config.axes()
    with fail_together("make the model", world):  # before any rank waits for it
        model = build(known, request.config, device, dtype, axes.tp)
    given, blocks = inputs(known, request.size, model, dtype), count_blocks(model)
    model.enable_parallelism(config=config)
    model(**given)  # what is exchanged once, in the first forward
    # An axis that is a joined one by itself has one group with it, and is meant.
    names = {axis.group: axis.name for axis in reversed(vars(axes).values()) if axis.group is not None}
    calls: list[_Call] = []

    def record(name: str, sent: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        shapes = [torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x for x in args]
        quietly = {key: value for key, value in kwargs.items() if key != "async_op"}
        calls.append(_Call(names[kwargs["group"]], name, sent, original, shapes, quietly))
        return original(*args, **kwargs)

    with collective_calls(record):
        output = tree_leaves(model(**given))[0]
    if not of_mesh.unchecked:
        of_mesh.distance = largest_of(distance(output, wanted), world)
        bar = bar_of(blocks, dtype, "communication" in degrees)
        if not of_mesh.distance <= bar:
            of_mesh.note = f"wrong: {of_mesh.distance:.1e} from {ONE}, more than {bar:.1e}"
            return []
    # Ranks send unevenly; which calls are alike must be the same for all.
    sent = all_gather_int64(torch.tensor([call.sent for call in calls], dtype=torch.int64), world).T.tolist()
    alike: dict[tuple, list[_Call]] = {}
    for call, row in zip(calls, sent, strict=True):
        alike.setdefault((call.axis, call.name, *row), []).append(call)
    return [(axis, name, row, len(same), same[0].again(device)) for (axis, name, *row), same in alike.items()]


def _in_a_row(again: Callable[[], Any]) -> Callable[[], None]:
    def in_a_row() -> None:
        for _ in range(IN_A_ROW):
            again()

    return in_a_row


def comm_table(found: Sequence[MeshComm]) -> str:
    """Of each mesh one line for each kind and size, then their sum; none of what is wrong."""
    lines = [("", "MB a rank", "calls a step", "us each", "(least to most)", "GB/s", "ms a step")]
    for of_mesh in found:
        compared = "" if of_mesh.distance is None else f"relative L2 to {ONE} {of_mesh.distance:.1e}"
        unchecked = of_mesh.unchecked and f"unchecked: {of_mesh.unchecked}"
        lines.append((f"{of_mesh.mesh}: {of_mesh.note or unchecked or compared}",))
        for each in of_mesh.collectives:
            least = f"({min(each.microseconds):.1f} to {max(each.microseconds):.1f})"
            sent = f"{max(each.sent) / 1e6:.3f}", str(each.calls)
            times = f"{each.median:.1f}", least, f"{each.gigabytes_a_second:.2f}", f"{each.milliseconds_a_step:.3f}"
            lines.append((each.title, *sent, *times))
        if not of_mesh.note:
            calls = sum(each.calls for each in of_mesh.collectives)
            lines.append(("all of them", "", str(calls), "", "", "", f"{of_mesh.milliseconds_a_step:.3f}"))
    return aligned(lines, 1)
