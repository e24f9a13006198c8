"""The guards by themselves: what one rank alone changed is the first rank's again."""

import unittest
from types import SimpleNamespace

import torch
import torch.distributed as dist
from parameterized import parameterized

from diffusers_rocm.hooks.rank_guard import SynchronisedInputs, SynchronisedScheduler

from ..distributed.test_collectives import world_axis
from ..testing_utils import run_ranks


class Scheduler:
    def __init__(self, as_tuple: bool):
        self.as_tuple = as_tuple

    def set_timesteps(self, count: int) -> None:
        rank = dist.get_rank()
        self.timesteps, self.sigmas = torch.arange(count) + 10 * rank, torch.linspace(1, 0, count) - rank

    def step(self, sample: torch.Tensor):
        sample = sample + dist.get_rank()
        return (sample, "more") if self.as_tuple else SimpleNamespace(prev_sample=sample)


def scheduler_worker(as_tuple: bool) -> list:
    scheduler = Scheduler(as_tuple)
    guard = SynchronisedScheduler(scheduler, world_axis())
    scheduler.set_timesteps(3)
    output = scheduler.step(torch.ones(2))
    sample = output[0] if as_tuple else output.prev_sample
    guard.remove()
    return [scheduler.timesteps.tolist(), scheduler.sigmas.tolist(), sample.tolist(), type(scheduler) is Scheduler]


def inputs_worker() -> list[float]:
    module = torch.nn.Identity()
    seen = []
    SynchronisedInputs(module, world_axis())
    module.forward = lambda *args, **kwargs: seen.append((args, kwargs))
    rank = float(dist.get_rank())
    module(torch.tensor(rank), [torch.tensor(rank)], timestep=torch.tensor(rank), extra={"a": torch.tensor(rank)})
    ((x, (y,)), kwargs) = seen[0]
    return [x.item(), y.item(), kwargs["timestep"].item(), kwargs["extra"]["a"].item()]


class TestRankGuard(unittest.TestCase):
    @parameterized.expand([(True,), (False,)])
    def test_scheduler(self, as_tuple):
        wanted = [[0, 1, 2], [1.0, 0.5, 0.0], [1.0, 1.0], True]
        assert run_ranks(3, scheduler_worker, as_tuple) == [wanted] * 3

    def test_inputs_by_position_and_by_name(self):
        assert run_ranks(3, inputs_worker) == [[0.0] * 4] * 3
