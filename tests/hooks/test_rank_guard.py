"""The guards by themselves: what differs between ranks is named on every rank, but for rounding."""

import copy
import unittest
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from parameterized import parameterized

from diffusers_rocm.distributed.agreement import agree
from diffusers_rocm.hooks.rank_guard import GuardedScheduler, InputGuard

from ..distributed.test_collectives import world_axis
from ..testing_utils import run_ranks


class Scheduler:
    """Each rank's latents are its own."""

    def __init__(self, as_tuple: bool = False):
        self.as_tuple = as_tuple

    def set_timesteps(self, count: int, shift: float = 0.0, sigma: float | None = None) -> None:
        self.timesteps = torch.arange(count) + shift
        self.sigmas = None if sigma is None else torch.linspace(sigma, 0, count)

    def step(self, sample: torch.Tensor):
        sample = sample + dist.get_rank()
        return (sample, "more") if self.as_tuple else SimpleNamespace(prev_sample=sample)


def message_of(error: type[Exception], function, *args, **kwargs) -> str:
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def scheduler_worker(as_tuple: bool) -> list:
    scheduler, events = Scheduler(as_tuple), []
    listener = SimpleNamespace(begin_run=lambda: events.append("run"), end_step=lambda: events.append("step"))
    guard = GuardedScheduler(scheduler, world_axis(), [listener])
    scheduler.set_timesteps(3)
    output = scheduler.step(torch.ones(2))
    sample = output[0] if as_tuple else output.prev_sample
    copied = copy.deepcopy(scheduler)
    copied.set_timesteps(2)
    guard.remove()
    return [sample.tolist(), type(scheduler) is Scheduler, events, len(scheduler.timesteps), len(copied.timesteps)]


def scheduler_errors_worker() -> dict:
    rank, scheduler = dist.get_rank(), Scheduler()
    guard = GuardedScheduler(scheduler, world_axis())
    messages = {"steps": message_of(ValueError, scheduler.set_timesteps, 3 + rank)}
    messages["timesteps"] = message_of(ValueError, scheduler.set_timesteps, 3, shift=0.5 * (rank == 2))
    messages["many timesteps"] = message_of(ValueError, scheduler.set_timesteps, 100, shift=1e-3 * (rank == 2))
    messages["sigmas"] = message_of(ValueError, scheduler.set_timesteps, 100, sigma=1 + 1e-3 * (rank == 1))
    bad, good = torch.tensor([1.0, torch.nan if rank == 1 else 2.0]), torch.ones(2)

    def run(count: int, bad_at: int, bad: torch.Tensor, steps: int | None = None) -> str:
        """After which step it is said, and what; an image to image pipeline takes the last of the steps only."""
        try:
            with guard.run():
                scheduler.set_timesteps(count)
                for step in range(steps or count):
                    scheduler.step(bad if step == bad_at else good)
                step = "end"
        except FloatingPointError as error:
            return f"{step} {error}"
        return "nothing"

    messages["first"] = run(12, 0, bad)
    messages["nan"] = run(12, 2, bad)
    messages["inf"] = run(7, 6, torch.full((2,), torch.inf))
    messages["of some steps"] = run(8, 3, bad, steps=4)
    scheduler.set_timesteps(8)
    scheduler.step(good), scheduler.step(bad)  # and somebody stopped it
    messages["next"] = run(3, 9, bad)
    sound = copy.deepcopy(scheduler)

    def with_sound() -> None:
        with guard.run():
            scheduler.set_timesteps(4), sound.set_timesteps(4)
            scheduler.step(good), sound.step(good), scheduler.step(good), sound.step(bad)

    messages["sound"] = message_of(FloatingPointError, with_sound)
    unchecked = Scheduler()
    GuardedScheduler(unchecked, world_axis(), check=False)
    unchecked.set_timesteps(3, shift=rank)
    messages["off"] = str(unchecked.step(bad).prev_sample.tolist())
    return messages


def agree_worker() -> dict:
    rank, axis = dist.get_rank(), world_axis()
    torch.manual_seed(0)
    x, results = torch.randn(40, 50), {}
    noise = torch.randn(40, 50)
    results["equal"] = agree("inputs", {"x": x, "name": "a", "none": None}, axis)
    results["rounded"] = agree("inputs", {"x": x + 1e-3 * rank * noise}, axis)
    results["bf16"] = agree("inputs", {"x": (x + 1e-3 * rank * noise).bfloat16()}, axis)
    results["no tensors"] = agree("inputs", {"a": 1}, axis)
    elsewhere = [Scheduler() for _ in range(1 + 100 * rank)]  # kept, so that the last is at another place on each rank
    results["an object"] = agree("inputs", {"cache": elsewhere[-1]}, axis)
    wrong = {
        "value": {"x": x + 0.2 * noise * (rank == 1)},
        "sign of one": {"few": torch.tensor([0.5, -0.25 if rank == 2 else 0.25])},
        "integers": {"mask": torch.arange(500) + (rank == 1)},
        "dtype": {"x": x.bfloat16() if rank == 1 else x},
        "shape": {"x": x[: 40 - rank]},
        "missing": {"x": x} | ({"guidance": torch.ones(1)} if rank == 0 else {}),
        "scalar": {"x": x, "frames": 9 + rank},
        "nan": {"x": torch.where(torch.arange(50) == 3, torch.nan, x) if rank == 1 else x},
        "order": {"x": x.flip(0) if rank == 1 else x},
    }
    for name, values in wrong.items():
        results[name] = message_of(ValueError, agree, "inputs", values, axis)
    return results


def inputs_worker(always: bool) -> dict:
    """The guard in the steps of two runs."""
    rank, module, seen = dist.get_rank(), torch.nn.Identity(), []
    guard = InputGuard(module, world_axis(), always)
    module.register_forward_pre_hook(lambda module, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    base = torch.linspace(-1, 1, 100)
    guard.in_pipeline = True
    results = {"class": type(module).__name__}
    module(base * (1 + 1e-4 * rank))
    results["synchronised"] = torch.equal(seen[-1][0][0], base)
    guard.end_step()
    module(base * (1 + 1e-4 * rank))  # and goes on
    results["still"] = torch.equal(seen[-1][0][0], base)
    guard.begin_run()
    module(base)
    guard.end_step()
    if always:
        results["later"] = message_of(ValueError, module, base + rank)
    else:
        module(base + rank)
        results["later"] = torch.equal(seen[-1][0][0], base + rank)
    guard.begin_run()
    results["first"] = message_of(ValueError, module, base + rank)
    guard.remove()
    module(base + rank)
    results["removed"] = type(module) is torch.nn.Identity and "around_call" not in vars(module)
    return results


class TestRankGuard(unittest.TestCase):
    @parameterized.expand([(True,), (False,)])
    def test_scheduler(self, as_tuple):
        wanted = [[1.0, 1.0], True, ["run", "step", "run"], 3, 2]
        assert run_ranks(3, scheduler_worker, as_tuple) == [wanted] * 3

    def test_errors_of_a_scheduler(self):
        for messages in run_ranks(3, scheduler_errors_worker):
            assert messages["steps"].endswith("the number of steps is 3 on rank 0 and 4 on rank 1 and 5 on rank 2")
            assert "different schedules: timesteps is [3]" in messages["timesteps"]
            assert "on ranks 0, 1 and " in messages["timesteps"] and "on rank 2" in messages["timesteps"]
            assert "different schedules: timesteps is [64]" in messages["many timesteps"]
            assert "different schedules: sigmas is [64]" in messages["sigmas"]
            assert messages["first"] == "0 step 0: NaN or inf in the latents of rank 1"
            assert messages["nan"] == "4 step 2: NaN or inf in the latents of rank 1"
            assert messages["inf"] == "end step 6: NaN or inf in the latents of ranks 0, 1, 2"
            assert messages["of some steps"] == "end step 3: NaN or inf in the latents of rank 1"
            assert messages["next"] == "nothing"
            assert messages["sound"] == "step 1: NaN or inf in the latents of rank 1"
            assert messages["off"] == "[1.0, 2.0]"

    def test_agree(self):
        for results in run_ranks(3, agree_worker):
            assert results["equal"] is True and results["no tensors"] is True and results["an object"] is True
            assert results["rounded"] is False and results["bf16"] is False
            assert "different inputs: x is [40, 50] float32 (" in results["value"]
            assert "on ranks 0, 2 and [40, 50] float32 (" in results["value"] and "on rank 1" in results["value"]
            assert "few is [2] float32 (0.5, 0.25; norm" in results["sign of one"]
            assert "[2] float32 (0.5, -0.25; norm" in results["sign of one"]
            assert "mask is [500] int64 (0, 1, 2, 3, ...;" in results["integers"]
            assert "bfloat16" in results["dtype"] and "float32" in results["dtype"]
            assert all(f"[{40 - rank}, 50]" in results["shape"] for rank in range(3))
            assert "guidance is [1] float32 (1; norm 1) on rank 0 and nothing on ranks 1, 2" in results["missing"]
            assert "frames is 9 on rank 0 and 10 on rank 1 and 11 on rank 2" in results["scalar"]
            assert "x is [40, 50]" in results["nan"] and "nan" in results["nan"]
            assert "x is [40, 50]" in results["order"]

    @parameterized.expand([(True,), (False,)])
    def test_inputs(self, always):
        for results in run_ranks(3, inputs_worker, always):
            assert results["class"] == "Identity" and results["removed"]
            assert results["synchronised"] and results["still"]
            assert "different inputs to Identity: input is [100] float32" in results["first"], results
            assert results["later"] is True if not always else "different inputs" in results["later"], results


if __name__ == "__main__":
    unittest.main()
