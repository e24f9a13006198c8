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
from ..distributed.axis import Axis
from ..distributed.collectives import all_gather_int64, broadcast_from_first
from ..models._modeling_parallel import ParallelConfig
from .collective_calls import collective_calls
from .distance import bar_of, distance
from .known_models import KNOWN_MODELS, build, count_blocks, inputs
from .step import ONE, Clock, StepRequest, free, noted, parse_mesh


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
    microseconds: list[float] = field(default_factory=list)

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


@dataclass
class MeshComm:
    """What a mesh sends in a step.

    Attributes:
        distance: of its output from that of one rank, relative L2.
        note: why there are no collectives.
    """

    mesh: str
    distance: float | None = None
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
    found, clock = [MeshComm(mesh) for mesh in request.meshes], Clock(device)
    timed: list[tuple[Collective, Callable[[], None]]] = []
    wanted: Tensor | None = None
    for each in found:
        with noted(each, Axis.of_all()):
            wanted, calls = _calls(request, each, device, wanted)
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


def _calls(
    request: StepRequest, of_mesh: MeshComm, device: torch.device, wanted: Tensor | None
) -> tuple[Tensor, list[tuple[str, list[int], int, Callable[[], Any]]]]:
    """One rank's output, and of each kind and size of collectives what `Collective` says of it, and how to make one.

    Notes how far the mesh's output is from one rank's, and whether that is too far: then there are none.

    Raises:
        ValueError: the model cannot be had so.
    """
    dtype, known, world = getattr(torch, request.dtype), KNOWN_MODELS[request.model], Axis.of_all()
    model = build(known, request.config, device, dtype)
    given, blocks = inputs(known, request.size, model, dtype), count_blocks(model)
    if wanted is None:
        wanted = tree_leaves(model(**given))[0]
    degrees = parse_mesh(of_mesh.mesh)
    model.enable_parallelism(config=ParallelConfig(**degrees))
    model(**given)  # what is exchanged once, in the first forward
    calls: list[_Call] = []

    def record(name: str, sent: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        shapes = [torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x for x in args]
        quietly = {key: value for key, value in kwargs.items() if key != "async_op"}
        calls.append(_Call(name, sent, original, shapes, quietly))
        return original(*args, **kwargs)

    with collective_calls(record):
        output = tree_leaves(model(**given))[0]
    own = torch.tensor([distance(output, wanted)], dtype=torch.float64)
    of_mesh.distance = broadcast_from_first(own, world).item()
    bar = bar_of(blocks, dtype, "communication" in degrees)
    if not of_mesh.distance <= bar:
        of_mesh.note = f"wrong: {of_mesh.distance:.1e} from {ONE}, more than {bar:.1e}"
        return wanted, []
    # Ranks send unevenly; which calls are alike must be the same for all.
    sent = all_gather_int64(torch.tensor([call.sent for call in calls], dtype=torch.int64), world).T.tolist()
    alike: dict[tuple, list[_Call]] = {}
    for call, row in zip(calls, sent, strict=True):
        alike.setdefault((call.name, *row), []).append(call)
    return wanted, [(name, row, len(same), same[0].again(device)) for (name, *row), same in alike.items()]


def _in_a_row(again: Callable[[], Any]) -> Callable[[], None]:
    def in_a_row() -> None:
        for _ in range(IN_A_ROW):
            again()

    return in_a_row


def comm_table(found: Sequence[MeshComm]) -> str:
    """Of each mesh one line for each kind and size, then their sum; none of what is wrong."""
    heading = (
        f"{'':12}{'MB a rank':>12}{'calls a step':>14}{'us each':>10}{'(least to most)':>20}{'GB/s':>8}"
        f"{'ms a step':>11}"
    )
    lines = []
    for of_mesh in found:
        lines += [f"{of_mesh.mesh}: {of_mesh.note or f'relative L2 to {ONE} {of_mesh.distance:.1e}'}"]
        for each in of_mesh.collectives:
            size = f"{max(each.sent) / 1e6:.3f}"
            least = f"({min(each.microseconds):.1f} to {max(each.microseconds):.1f})"
            lines.append(
                f"{each.name:12}{size:>12}{each.calls:>14}{each.median:>10.1f}{least:>20}"
                f"{each.gigabytes_a_second:>8.2f}{each.milliseconds_a_step:>11.3f}"
            )
        if not of_mesh.note:
            calls = sum(each.calls for each in of_mesh.collectives)
            lines.append(f"{'all of them':12}{'':12}{calls:>14}{'':38}{of_mesh.milliseconds_a_step:>11.3f}")
    return "\n".join([heading, *lines])
