"""One axis of the device mesh, as the rest of the package sees it."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


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
    """

    name: str
    group: dist.ProcessGroup | None
    rank: int
    size: int
    first: int
    device: torch.device

    def __deepcopy__(self, memo: dict) -> "Axis":
        return self  # a copied model is on the same ranks

    @classmethod
    def single(cls, name: str) -> "Axis":
        return cls(name, None, 0, 1, 0, torch.device("cpu"))

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, name: str) -> "Axis":
        """The axis of a 1-D mesh."""
        if mesh.size() == 1:
            return cls.single(name)
        group = mesh.get_group()
        if mesh.device_type == "cpu":
            device = torch.device("cpu")
        else:
            device = torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
        first = dist.get_process_group_ranks(group)[0]
        return cls(name, group, mesh.get_local_rank(), mesh.size(), first, device)
