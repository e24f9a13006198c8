"""Pipelines that are made of a parallel one's components, and schedulers that are replaced, are parallel too."""

import copy
import unittest

import torch
from diffusers import (
    AutoPipelineForText2Image,
    FlowMatchEulerDiscreteScheduler,
    FluxImg2ImgPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
)
from parameterized import parameterized

from diffusers_rocm import ParallelConfig, parallelize

from ..models.testing_utils.parallelism import FLOAT32_BAR
from ..testing_utils import message_of, relative_l2, run_ranks
from .testing_utils import PIPELINES, build, latents


WAYS = {
    "from_pipe": FluxPipeline.from_pipe,
    "auto": AutoPipelineForText2Image.from_pipe,
    "components": lambda pipe: FluxPipeline(**pipe.components),
    "its type": lambda pipe: type(pipe).from_pipe(pipe),
    "its type and components": lambda pipe: type(pipe)(**pipe.components),
    "there and back": lambda pipe: FluxPipeline.from_pipe(FluxImg2ImgPipeline.from_pipe(pipe)),
}


def shared_worker(way: str, degrees: dict[str, int]) -> dict:
    arguments, plain = PIPELINES["flux"].call(2), build("flux")
    torch.manual_seed(3)
    seed = torch.randint(2**62, ()).item()  # what the ranks draw together
    wanted = [latents(plain, arguments, seed=seed)]
    plain.scheduler = FlowMatchEulerDiscreteScheduler(shift=2.0)
    wanted.append(latents(plain, arguments, seed=seed))

    pipe = build("flux")
    parallelize(pipe, ParallelConfig(**degrees))
    other = WAYS[way](pipe)
    other.set_progress_bar_config(disable=True)
    given, rows = [], []
    other.transformer.transformer_blocks[0].register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(kwargs["hidden_states"].shape[0]), with_kwargs=True
    )
    for scheduler in (other.scheduler, FlowMatchEulerDiscreteScheduler(shift=2.0)):
        other.scheduler = scheduler
        torch.manual_seed(3 + torch.distributed.get_rank())
        given.append(latents(other, arguments, seed=None))
    old, new = pipe.scheduler, other.scheduler
    guarded = [hasattr(each, "guards") for each in (old, new)]
    other.transformer.disable_parallelism()
    return {
        "errors": [relative_l2(x, y) for x, y in zip(given, wanted, strict=True)],
        "rows": max(rows[-6:]),
        "guarded": guarded,
        "classes": {type(pipe), type(other)} == {FluxPipeline} and type(new) is FlowMatchEulerDiscreteScheduler,
    }


def made_before_worker(degrees: dict[str, int]) -> dict:
    """A pipeline that had the denoiser before it became parallel, and has a scheduler of its own."""
    arguments, pipe = PIPELINES["flux"].call(1), build("flux")
    other = FluxPipeline.from_pipe(pipe)
    other.scheduler = FlowMatchEulerDiscreteScheduler(shift=2.0)
    wanted = latents(other, arguments, seed=5)
    parallelize(pipe, ParallelConfig(**degrees))
    latents(pipe, arguments, seed=5)
    torch.manual_seed(3 + torch.distributed.get_rank())
    return {
        "error": relative_l2(latents(other, arguments, seed=5), wanted),
        "message": message_of(latents, other, arguments, seed=None),
    }


REPLACED = {
    "config": lambda scheduler: scheduler.from_config(scheduler.config, shift=2.0),
    "its type": lambda scheduler: type(scheduler).from_config(scheduler.config, shift=2.0),
    "copy": copy.deepcopy,
}


def replaced_worker(way: str) -> dict:
    """A scheduler made by the one that it replaces."""
    arguments, pipe = PIPELINES["flux"].call(1), build("flux")
    parallelize(pipe, ParallelConfig(tp=2))
    latents(pipe, arguments, seed=5)
    old = pipe.scheduler
    pipe.scheduler = REPLACED[way](old)
    latents(pipe, arguments, seed=5)
    guards = len(pipe.scheduler.guards)
    model = type(pipe.transformer).from_config(pipe.transformer.config)
    pipe.transformer.disable_parallelism()
    latents(pipe, arguments, seed=5)
    plain = type(pipe.scheduler) is type(old) is FlowMatchEulerDiscreteScheduler
    return {"guards": guards, "plain": plain, "model": type(model)}


class TestSharedComponents(unittest.TestCase):
    @parameterized.expand([({"tp": 2},), ({"cfg": 2},)])
    def test_a_pipeline_made_before(self, degrees):
        for result in run_ranks(2, made_before_worker, degrees):
            assert result["error"] <= FLOAT32_BAR, result
            assert "the ranks were given different inputs to FluxTransformer2DModel" in result["message"], result

    @parameterized.expand([(way,) for way in REPLACED])
    def test_schedulers(self, way):
        for result in run_ranks(2, replaced_worker, way):
            assert result == {"guards": 1, "plain": True, "model": FluxTransformer2DModel}, result

    @parameterized.expand([(way, degrees) for way in WAYS for degrees in ({"dp": 2}, {"tp": 2})])
    def test_pipelines(self, way, degrees):
        for result in run_ranks(2, shared_worker, way, degrees):
            assert max(result["errors"]) <= FLOAT32_BAR, result
            assert result["guarded"] == [False, True] and result["classes"], result
            assert result["rows"] == (1 if "dp" in degrees else 2), result


if __name__ == "__main__":
    unittest.main()
