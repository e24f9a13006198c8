"""One axis of the device mesh, as the rest of the package sees it."""

from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from . import default_device_type
from .compression import EXACT


@dataclass(frozen=True)
class Axis:
    """The ranks that share one split.

    Attributes:
        name: `"tp"`, say.
        group: the process group; None for an axis of one rank.
        rank: this process' place on the axis.
        size: number of ranks on the axis.
        first: global rank of the axis' first rank, the source of broadcasts.
        device: where the group's collectives want their tensors.
        communication: how activations are sent: `"exact"`, or in 8 bits (`compression`).
        slow_links: by which messages go as is best over such; measured (`links`), and no part of what an axis is.
        multiprocessors: of the GPU on it that has the fewest, by which all cut their messages alike; likewise.
        known_gpus: whether messages go as is best where that was measured (`choices.is_known`); likewise.
        peer_memory: whether steps are graphs and each rank reaches the others' memory, over fast links; likewise.
    """

    name: str
    group: dist.ProcessGroup | None
    rank: int
    size: int
    first: int
    device: torch.device
    communication: str = EXACT
    slow_links: bool = field(default=False, compare=False)
    multiprocessors: int | None = field(default=None, compare=False)
    known_gpus: bool = field(default=False, compare=False)
    peer_memory: bool = field(default=False, compare=False)

    def ranks(self) -> list[int]:
        """Global ranks of the axis, in its order."""
        return [0] if self.group is None else dist.get_process_group_ranks(self.group)

    def __deepcopy__(self, memo: dict) -> "Axis":
        return self  # a copied model is on the same ranks

    @classmethod
    def single(cls, name: str) -> "Axis":
        """An axis of one rank: nothing is sent."""
        return cls(name, None, 0, 1, 0, torch.device("cpu"))

    @classmethod
    def of_all(cls) -> "Axis":
        """All ranks that were started."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls.single("world")
        device = _current_device(default_device_type())
        return cls("world", dist.group.WORLD, dist.get_rank(), dist.get_world_size(), 0, device)

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, name: str) -> "Axis":
        """The axis of a 1-D mesh."""
        if mesh.size() == 1:
            return cls.single(name)
        group = mesh.get_group()
        first = dist.get_process_group_ranks(group)[0]
        return cls(name, group, mesh.get_local_rank(), mesh.size(), first, _current_device(mesh.device_type))


def _current_device(kind: str) -> torch.device:
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long the ranks of a group wait for each other."""
    return group._get_backend(device).options._timeout
