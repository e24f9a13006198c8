"""Groups of a mesh: how long they wait, and those of its hosts."""

import unittest
from dataclasses import fields, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from diffusers_rocm import ParallelConfig
from diffusers_rocm.distributed.collectives import all_gather_int64
from diffusers_rocm.distributed.mesh import Axes, of_hosts

from ..testing_utils import run_ranks, slow


def seconds(group: dist.ProcessGroup) -> float:
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def timeouts(axes: Axes) -> dict[str, float]:
    every = (getattr(axes, field.name) for field in fields(axes))
    return {axis.name: seconds(axis.group) for axis in every if axis.size > 1}


def timeouts_worker(names: tuple[str, ...]) -> dict[str, dict[str, float]]:
    dist.group.WORLD.set_timeout(timedelta(seconds=77))
    made = timeouts(ParallelConfig(**dict.fromkeys(names, 2)).axes())
    mesh = init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
    mesh[names[0]].get_group().set_timeout(timedelta(seconds=99))
    return {"made": made, "own": timeouts(ParallelConfig(mesh=mesh).axes())}


def hosts_worker() -> tuple[list[int], float, list[bool]]:
    """Of a group of GPUs, which stands for one of CPUs here, that of its ranks' hosts."""
    dist.group.WORLD.set_timeout(timedelta(seconds=77))
    axis = ParallelConfig(dp=2, tp=2).axes().model
    of_gpus = replace(axis, device=torch.device("cuda", 0))
    hosts = of_hosts(of_gpus)
    told = all_gather_int64(torch.tensor([dist.get_rank()]), hosts).flatten().tolist()
    own = hosts.group is not axis.group, of_hosts(of_gpus) is hosts, of_hosts(axis) is axis
    return told, seconds(hosts.group), [*own]


class TestMeshTimeouts(unittest.TestCase):
    def test_hosts(self):
        for rank, (told, timeout, own) in enumerate(run_ranks(4, hosts_worker)):
            assert told == [rank // 2 * 2, rank // 2 * 2 + 1] and timeout == 77.0 and all(own), (told, timeout, own)

    def test_timeouts(self):
        for results in run_ranks(4, timeouts_worker, ("dp", "ring")):
            assert results["made"] == dict.fromkeys(("dp", "ring", "context", "model", "replica", "world"), 77.0)
            assert results["own"]["dp"] == 99.0 and results["own"]["ring"] != 77.0  # as the caller left them

    @slow
    def test_timeouts_of_several_axes_together(self):
        names = ("dp", "ring", "ulysses", "context", "model", "replica", "world")
        for results in run_ranks(8, timeouts_worker, ("dp", "ring", "ulysses")):
            assert results["made"] == dict.fromkeys(names, 77.0)
            # Those that are made of several of the caller's have the default group's.
            assert results["own"]["dp"] == 99.0 and results["own"]["context"] == results["own"]["world"] == 77.0
            assert results["own"]["ring"] == results["own"]["ulysses"] != 77.0


if __name__ == "__main__":
    unittest.main()
