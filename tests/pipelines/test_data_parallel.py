"""Pictures spread over replicas: in the order asked, and those that one process makes."""

import unittest

import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, LTXImageToVideoPipeline
from parameterized import parameterized
from PIL import Image

from diffusers_rocm import DataParallelConfig, ParallelConfig, parallelize
from diffusers_rocm.pipelines.model_folder import EMBEDDED_MODEL

from ..models.testing_utils.parallelism import FLOAT32_BAR
from ..testing_utils import relative_l2, run_ranks
from .testing_utils import PIPELINES, build, latents, ltx, ltx_call
from .testing_vaes import TINY_VAES


def generators(kind: str, pictures: int):
    if kind == "one":
        return torch.Generator().manual_seed(7)
    if kind == "list":
        return [torch.Generator().manual_seed(index) for index in range(pictures)]
    torch.manual_seed(3 + dist.get_rank())  # that of the first rank is taken
    return None


def states(given) -> list[torch.Tensor]:
    return [each.get_state() for each in (given if isinstance(given, list) else [given] if given is not None else [])]


def loop_worker(name: str, degrees: dict, prompts: int, per_prompt: int, kind: str, stochastic: bool) -> dict:
    """Two calls one after the other, which the same generators serve."""
    arguments = PIPELINES[name].call(prompts)
    per_prompt_name = "num_videos_per_prompt" if name.startswith("wan") else "num_images_per_prompt"
    arguments[per_prompt_name] = per_prompt

    def run(parallel: bool) -> tuple[list, list]:
        pipe = build(name)
        if stochastic:
            pipe.scheduler = type(pipe.scheduler).from_config({**pipe.scheduler.config, "stochastic_sampling": True})
        if parallel:
            parallelize(pipe, ParallelConfig(**degrees))
        given = generators(kind, prompts * per_prompt)
        outputs = [latents(pipe, arguments, seed=None, generator=given, steps=2) for _ in range(2)]
        return outputs, states(given)

    if kind == "none":
        # What one process draws when it is given the seed that the ranks draw together.
        pipe, wanted = build(name), []
        torch.manual_seed(3)
        for _ in range(2):
            seed = torch.randint(2**62, ()).item()
            wanted.append(latents(pipe, arguments, seed=seed, steps=2))
        wanted_states = []
    else:
        wanted, wanted_states = run(parallel=False)
    outputs, after = run(parallel=True)
    return {
        "shape": [*outputs[0].shape] == [*wanted[0].shape],
        "errors": [relative_l2(a, b) for a, b in zip(torch.cat(outputs), torch.cat(wanted), strict=True)],
        "states": all(torch.equal(a, b) for a, b in zip(after, wanted_states, strict=True)),
    }


PROMPTS = [f"a {shape} on a white background" for shape in ("red circle", "green star", "blue square")]


def pictures_worker(dp: int, output_type: str, prompts: int, per_prompt: int) -> list:
    pipe = FluxPipeline.from_pretrained(EMBEDDED_MODEL)
    pipe.set_progress_bar_config(disable=True)
    call = {"height": 128, "width": 128, "num_inference_steps": 2, "max_sequence_length": 16}

    def run(**changes):
        seeds = [torch.Generator().manual_seed(index) for index in range(prompts * per_prompt)]
        prompt = PROMPTS[:prompts] if prompts > 1 else PROMPTS[0]
        return pipe(
            prompt,
            generator=seeds,
            num_images_per_prompt=per_prompt,
            output_type=output_type,
            **call,
            **changes,
        )

    wanted = run().images
    parallelize(pipe, DataParallelConfig(dp=dp))
    named, (plain,) = run().images, run(return_dict=False)

    def numbers(images) -> np.ndarray:
        return np.stack([np.asarray(image, dtype=float) for image in images])

    return [
        type(named) is type(plain) is type(wanted) and type(named[0]) is type(wanted[0]),
        max(np.abs(numbers(each) - numbers(wanted)).max() for each in (named, plain)),
    ]


class WithImage(FluxPipeline):
    """Takes a picture, and does nothing with it."""

    def __call__(self, image=None, generator=None, **kwargs):
        return super().__call__(generator=generator, **kwargs)


def errors_worker() -> dict[str, str]:
    pipe, arguments, messages = build("flux"), PIPELINES["flux"].call(3), {}
    pipe.__class__ = WithImage
    parallelize(pipe, DataParallelConfig(dp=2))

    def refuse(name: str, **changes) -> None:
        with pytest.raises(ValueError) as caught:
            latents(pipe, arguments, seed=None, **changes)
        messages[name] = str(caught.value)

    arguments["prompt_embeds"] = arguments["prompt_embeds"][:0]
    refuse("none")
    arguments = PIPELINES["flux"].call(3)
    refuse("generators", generator=[torch.Generator().manual_seed(index) for index in range(2)])
    picture, seeded = Image.new("RGB", (16, 16)), [torch.Generator().manual_seed(index) for index in range(3)]
    refuse("twice", generator=[torch.Generator()] * 3)
    refuse("pictures", image=[picture] * 3)
    refuse("drawn with", image=picture, generator=seeded)
    refuse("pixels", image=Image.new("RGB", (16, 16), (dist.get_rank(), 0, 0)))
    refuse("seeds", generator=torch.Generator().manual_seed(dist.get_rank()))
    refuse("forgotten", generator=torch.Generator().manual_seed(0) if dist.get_rank() else None)
    pipe.scheduler.register_to_config(shift=1.0 + dist.get_rank())
    refuse("schedulers")
    pipe.scheduler.register_to_config(shift=1.0)
    pipe.transformer.disable_parallelism()
    messages["afterwards"] = str(latents(pipe, arguments).shape[0])
    return messages


def own_draws_worker(prompts: int) -> dict:
    """A pipeline that draws for its VAE by itself, and a scheduler that draws by other means."""
    picture = Image.fromarray((np.random.RandomState(0).rand(64, 96, 3) * 255).astype("uint8"))
    arguments = {"image": picture, "decode_timestep": 0.05, "decode_noise_scale": 0.025, "output_type": "np"}
    arguments |= ltx_call(prompts) | {"num_inference_steps": 2}
    pipes, answers, after = [], [], []
    for _ in range(2):
        transformer, scheduler = ltx().transformer, FlowMatchEulerDiscreteScheduler()
        pipe = LTXImageToVideoPipeline(scheduler, TINY_VAES["ltx_timestep"].build(), None, None, transformer)
        pipe.set_progress_bar_config(disable=True)
        pipes.append(pipe)
    parallelize(pipes[1], ParallelConfig(dp=2))
    for pipe in pipes:
        generator = torch.Generator().manual_seed(7)
        answers.append(torch.from_numpy(pipe(**arguments, generator=generator).frames))
        after.append(generator.get_state())

    generator = torch.Generator().manual_seed(7)
    pipes[1].transformer.register_forward_hook(lambda *_: torch.rand(1, generator=generator) and None)
    with pytest.raises(ValueError) as caught:
        pipes[1](**arguments, generator=generator)
    return {
        "errors": [relative_l2(a, b) for a, b in zip(answers[1], answers[0], strict=True)],
        "same state": torch.equal(*after),
        "message": str(caught.value),
    }


# Prompts, pictures of each, generators, stochastic schedule.
CASES = [
    ("flux", {"dp": 2}, 2, 1, "list", False),
    ("flux", {"dp": 2}, 3, 1, "one", False),
    ("flux", {"dp": 2}, 1, 3, "one", False),
    ("flux", {"dp": 2}, 3, 1, "none", False),
    ("flux", {"dp": 2}, 3, 1, "one", True),
    ("flux", {"dp": 2}, 4, 1, "list", True),
    ("flux", {"dp": 3}, 1, 1, "one", False),
    ("flux", {"dp": 3}, 4, 1, "list", True),
    ("wan", {"dp": 2}, 3, 1, "one", False),
    ("sd3", {"dp": 2}, 3, 1, "list", False),
    ("flux", {"dp": 2, "cfg": 2}, 3, 1, "one", False),
    ("wan", {"dp": 2, "tp": 2}, 1, 3, "list", False),
]


class TestDataParallel(unittest.TestCase):
    @parameterized.expand([(2,), (3,)])
    def test_what_pipelines_draw_by_themselves(self, prompts):
        for result in run_ranks(2, own_draws_worker, prompts):
            assert len(result["errors"]) == prompts and max(result["errors"]) <= FLOAT32_BAR, result
            assert result["same state"] and "draws from its generator by other means" in result["message"], result

    @parameterized.expand(CASES)
    def test_whole_loop(self, name, degrees, prompts, per_prompt, kind, stochastic):
        world = torch.Size(degrees.values()).numel()
        for result in run_ranks(world, loop_worker, name, degrees, prompts, per_prompt, kind, stochastic):
            assert result["shape"] and result["states"], result
            assert len(result["errors"]) == 2 * prompts * per_prompt and max(result["errors"]) <= FLOAT32_BAR, result

    @parameterized.expand([("pil", 3, 1), ("np", 2, 2), ("pt", 3, 1), ("pil", 1, 1), ("pil", 2, 3), ("np", 1, 3)])
    def test_pictures(self, output_type, prompts, per_prompt):
        for same_types, difference in run_ranks(2, pictures_worker, 2, output_type, prompts, per_prompt):
            assert same_types and difference <= (1 if output_type == "pil" else 1e-4), difference

    def test_errors(self):
        for messages in run_ranks(2, errors_worker):
            assert "2 generators for 3 pictures" in messages["generators"]
            assert "is given no prompts" in messages["none"]
            assert "3 generators for 3 pictures; give one, or one of its own for each" in messages["twice"]
            assert "3 of image and 3 prompts" in messages["pictures"]
            assert "with image and dp=2, give one generator for all" in messages["drawn with"]
            assert "different arguments: image is" in messages["pixels"], messages
            assert "different arguments: scheduler.shift is" in messages["schedulers"], messages
            assert "different generators (seed 0 on rank 0, seed 1 on rank 1)" in messages["seeds"]
            assert "different generators (none on rank 0, seed 0 on rank 1)" in messages["forgotten"]
            assert messages["afterwards"] == "3"


if __name__ == "__main__":
    unittest.main()
