"""Pipelines that are made of a parallel one's components, and schedulers that are replaced, are parallel too."""

import unittest

import torch
from diffusers import AutoPipelineForText2Image, FlowMatchEulerDiscreteScheduler, FluxImg2ImgPipeline, FluxPipeline
from parameterized import parameterized

from diffusers_rocm import ParallelConfig, parallelize

from ..models.testing_utils.parallelism import FLOAT32_BAR
from ..testing_utils import relative_l2, run_ranks
from .testing_utils import PIPELINES, build, latents


WAYS = {
    "from_pipe": FluxPipeline.from_pipe,
    "auto": AutoPipelineForText2Image.from_pipe,
    "components": lambda pipe: FluxPipeline(**pipe.components),
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


class TestSharedComponents(unittest.TestCase):
    @parameterized.expand([(way, degrees) for way in WAYS for degrees in ({"dp": 2}, {"tp": 2})])
    def test_pipelines(self, way, degrees):
        for result in run_ranks(2, shared_worker, way, degrees):
            assert max(result["errors"]) <= FLOAT32_BAR, result
            assert result["guarded"] == [False, True] and result["classes"], result
            assert result["rows"] == (1 if "dp" in degrees else 2), result


if __name__ == "__main__":
    unittest.main()
