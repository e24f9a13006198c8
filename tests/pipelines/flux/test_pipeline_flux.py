"""The embedded checkpoint through diffusers' own FluxPipeline: the pictures must be right, on any number of ranks.

This sees what no tensor comparison with random weights does: pure noise, drawn without a crash.
"""

import copy
import math
import sys
import unittest
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusers import FluxPipeline, FluxTransformer2DModel
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from parameterized import parameterized

from diffusers_rocm import ContextParallelConfig, ParallelConfig, TensorParallelConfig, parallelize
from diffusers_rocm.distributed import collectives
from diffusers_rocm.distributed.sharding import Block, Shard
from diffusers_rocm.hooks.rank_guard import InputGuard
from diffusers_rocm.models.plans import get_tensor_parallel_plan
from diffusers_rocm.pipelines.model_folder import EMBEDDED_MODEL

from ...models.testing_utils.workers import BF16_RATIO
from ...models.transformers.test_models_transformer_flux import FluxTransformerTesterConfig
from ...testing_utils import relative_l2, require_torch_multi_accelerator, run_ranks, slow


sys.path.insert(0, str(Path(__file__).parents[3] / "utils"))
from check_shapes import held_out_prompts, matches, read_picture, training_prompts  # noqa: E402


RED_CIRCLE = "a red circle on a blue background"
CALL = {"height": 128, "width": 128, "num_inference_steps": 8, "max_sequence_length": 16}


def draw(pipe: FluxPipeline, prompts: list[str], **changes) -> list:
    """One picture a prompt, each from latents of its own that do not depend on the batch."""
    images = []
    for start in range(0, len(prompts), 16):
        batch = prompts[start : start + 16]
        generators = [torch.Generator().manual_seed(1000 + start + index) for index in range(len(batch))]
        images += pipe(batch, generator=generators, **{**CALL, **changes}).images
    return images


def load() -> FluxPipeline:
    pipe = FluxPipeline.from_pretrained(EMBEDDED_MODEL)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def answers_worker(tp: int, prompts: list[str]) -> list[tuple]:
    pipe = load()
    parallelize(pipe, TensorParallelConfig(tp=tp))
    return [tuple(read_picture(image)) for image in draw(pipe, prompts)]


@mock.patch.object(collectives, "COMPRESSED_FROM", 1)
def rounded_worker(degrees: dict[str, int], prompts: list[str]) -> list[tuple]:
    pipe = load()
    parallelize(pipe, ParallelConfig(**degrees, communication="int8"))
    return [tuple(read_picture(image)) for image in draw(pipe, prompts)]


def context_worker(ring: int, ulysses: int, prompts: list[str]) -> list:
    pipe = load()
    parallelize(pipe, ContextParallelConfig(ring, ulysses))
    return draw(pipe, prompts)


def naive_worker(tp: int, prompts: list[str]) -> int:
    """How many pictures are right with bug TP-1: the single blocks' proj_out cut as one contiguous run."""
    pipe = load()
    full = [block.proj_out.weight.detach().clone() for block in pipe.transformer.single_transformer_blocks]
    parallelize(pipe, TensorParallelConfig(tp=tp))
    for block, weight in zip(pipe.transformer.single_transformer_blocks, full, strict=True):
        naive = Shard(1, (Block(weight.shape[1], 1),)).take(weight, dist.get_rank(), tp)
        block.proj_out.weight.data.copy_(naive)
    return sum(matches(image, prompt) for image, prompt in zip(draw(pipe, prompts), prompts, strict=True))


def perturbed_worker(tp: int, what: str) -> dict:
    """The ranks are fed different things: what the guard says, and what they would have made without it."""
    pipe, rank = load(), dist.get_rank()
    prompts = [RED_CIRCLE, "a green star on a white background"]

    def latents(rank: int) -> torch.Tensor:
        prompt = prompts[rank != 0] if what == "prompt" else prompts[0]
        generator = torch.Generator().manual_seed(rank if what == "generator" else 0)
        given = {"latents": torch.randn(1, 256, 32, generator=generator) + rank} if what == "latents" else {}
        return pipe(prompt, generator=generator, output_type="latent", **given, **CALL).images

    wanted = latents(0)
    if what == "schedule":
        pipe.scheduler = type(pipe.scheduler).from_config({**pipe.scheduler.config, "shift": 2.0 + rank})
    classes = [type(each) for each in (pipe, pipe.scheduler, pipe.transformer)]
    parallelize(pipe, TensorParallelConfig(tp=tp))
    with pytest.raises(ValueError) as caught:
        latents(rank)
    pipe.transformer.disable_parallelism()
    clean = [type(each) for each in (pipe, pipe.scheduler, pipe.transformer)] == classes
    parallelize(pipe, TensorParallelConfig(tp=tp), rank_check="off")
    unguarded = latents(rank)

    pipe.transformer.disable_parallelism()
    (image,) = draw(pipe, [RED_CIRCLE]) if rank == 0 else [None]  # on one rank alone: nothing may wait for the others
    return {
        "message": str(caught.value),
        "unguarded": relative_l2(unguarded, wanted),
        "clean": clean,
        "right": image is None or matches(image, RED_CIRCLE),
    }


def two_pipelines_worker(tp: int) -> list[bool]:
    """Two pipelines with one scheduler, and a copy of that scheduler."""
    one, two = load(), load()
    two.scheduler = one.scheduler
    plain = type(one.scheduler)
    for pipe in (one, two):
        parallelize(pipe, TensorParallelConfig(tp=tp))
    copied = copy.deepcopy(one.scheduler)
    copied.set_timesteps(4)
    before = len(one.scheduler.timesteps)
    one.transformer.disable_parallelism()
    still = type(two.scheduler) is not plain
    two(RED_CIRCLE, output_type="latent", **CALL)
    two.transformer.disable_parallelism()
    return [len(copied.timesteps) == 4, before != 4, still, type(one.scheduler) is plain]


def half_planned_worker(tp: int) -> tuple[str, bool]:
    pipe = load()
    pipe.transformer_2 = torch.nn.Linear(1, 1)
    pipe.transformer_2.enable_parallelism = lambda config: get_tensor_parallel_plan(type(pipe.transformer_2))
    with pytest.raises(ValueError) as caught:
        parallelize(pipe, TensorParallelConfig(tp=tp))
    return str(caught.value), hasattr(pipe.transformer, "parallelism")


def gradient_and_compile_worker(tp: int) -> tuple[float, float]:
    """Through the input guard: the error of a gradient, and of a forward compiled as a whole without a break."""
    config = FluxTransformerTesterConfig()
    model, inputs = config.get_model(), config.get_dummy_inputs(1)
    x = inputs["hidden_states"].requires_grad_()
    reference = config.get_output(model, inputs)
    (wanted,) = torch.autograd.grad(reference.square().sum(), x)
    model.enable_parallelism(config=TensorParallelConfig(tp=tp))
    model.parallelism.hooks.append(InputGuard(model, model.parallelism.axes.model))
    (got,) = torch.autograd.grad(config.get_output(model, inputs).square().sum(), x)
    torch._dynamo.reset()
    model.compile(fullgraph=True, backend="aot_eager")
    if dist.get_rank() > 0:  # as if rounded otherwise
        inputs["hidden_states"] = inputs["hidden_states"] * 1.001
    with torch.no_grad():
        return relative_l2(got, wanted), relative_l2(config.get_output(model, inputs), reference)


def shapes_worker(tp: int) -> str:
    pipe = load()
    parallelize(pipe, TensorParallelConfig(tp=tp))
    with pytest.raises(ValueError) as caught:
        pipe([RED_CIRCLE] * (1 + dist.get_rank()), **CALL)
    return str(caught.value)


def steps_worker(tp: int) -> str:
    pipe = load()
    parallelize(pipe, TensorParallelConfig(tp=tp))
    with pytest.raises(ValueError) as caught:
        pipe(RED_CIRCLE, **{**CALL, "num_inference_steps": 3 + dist.get_rank()})
    return str(caught.value)


@torch.no_grad()
def checkpoint_worker(path: str, tp: int, device: str) -> tuple[float, float]:
    """Errors of one forward of a real checkpoint in bf16 against float32: on one rank, and sharded."""
    generator = torch.Generator().manual_seed(0)
    model = FluxTransformer2DModel.from_pretrained(path, subfolder="transformer").to(torch.bfloat16).to(device)
    config, side, text = model.config, 16, 64
    ids = torch.zeros(side, side, 3)
    ids[..., 1] += torch.arange(side)[:, None]
    ids[..., 2] += torch.arange(side)[None]
    inputs = {
        "hidden_states": torch.randn(1, side * side, config.in_channels, generator=generator),
        "encoder_hidden_states": torch.randn(1, text, config.joint_attention_dim, generator=generator),
        "pooled_projections": torch.randn(1, config.pooled_projection_dim, generator=generator),
        "timestep": torch.tensor([0.5]),
        "img_ids": ids.reshape(-1, 3),
        "txt_ids": torch.zeros(text, 3),
    }
    if config.guidance_embeds:
        inputs["guidance"] = torch.tensor([4.0])
    inputs = {name: value.to(device) for name, value in inputs.items()}
    half = {name: value.bfloat16() for name, value in inputs.items()}
    exact = {name: value.float() for name, value in half.items()}
    single = model(**half).sample
    reference = model.float()(**exact).sample
    model.to(torch.bfloat16).enable_parallelism(config=TensorParallelConfig(tp=tp))
    return relative_l2(single.cpu(), reference.cpu()), relative_l2(model(**half).sample.cpu(), reference.cpu())


def fetch(repository: str) -> str:
    """The transformer of a checkpoint on the Hub; skips where it cannot be had."""
    try:
        return snapshot_download(repository, allow_patterns=["transformer/*"])
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        pytest.skip(f"{repository} cannot be fetched: {type(error).__name__}")


class TestEmbeddedFlux(unittest.TestCase):
    def test_held_out_prompts_are_right_and_equal_on_2_ranks(self):
        self.check_held_out_prompts(16, (2,))

    @slow
    def test_all_held_out_prompts_are_right_and_equal_on_2_and_4_ranks(self):
        self.check_held_out_prompts(64, (2, 4))

    def check_held_out_prompts(self, count, degrees):
        prompts = held_out_prompts(count)
        assert len(set(prompts)) == count and not set(prompts) & set(training_prompts())
        single = answers_worker(1, prompts)
        right = sum(matches_answer(answer, prompt) for answer, prompt in zip(single, prompts, strict=True))
        assert right >= 0.95 * count, f"{right} of {count} right in one process"
        for tp in degrees:
            for answers in run_ranks(tp, answers_worker, tp, prompts):
                different = [(p, a, b) for p, a, b in zip(prompts, single, answers, strict=True) if a != b]
                assert not different, different

    def test_activations_in_8_bits(self):
        self.check_rounded({"ulysses": 2, "tp": 2}, 16)

    @parameterized.expand([({"tp": 2},), ({"ulysses": 2},), ({"ring": 2},)])
    @slow
    def test_activations_in_8_bits_on_one_axis(self, degrees):
        self.check_rounded(degrees, 64)

    def check_rounded(self, degrees, count):
        """As many pictures are right as in one process."""
        prompts = held_out_prompts(count)
        answers = [answers_worker(1, prompts)]
        answers += run_ranks(math.prod(degrees.values()), rounded_worker, degrees, prompts)
        counts = [sum(map(matches_answer, each, prompts)) for each in answers]
        assert min(counts) == counts[0] >= 0.95 * count, counts

    def test_demo_pictures_with_a_split_sequence(self):
        self.check_demo_pictures(2, 2)

    @parameterized.expand([(2, 1), (1, 2)])
    @slow
    def test_demo_pictures_by_one_way_of_splitting(self, ring, ulysses):
        self.check_demo_pictures(ring, ulysses)

    def check_demo_pictures(self, ring, ulysses):
        prompts = (Path(__file__).parents[3] / "utils" / "demo_prompts.txt").read_text().splitlines()
        single = draw(load(), prompts)
        for pictures in run_ranks(ring * ulysses, context_worker, ring, ulysses, prompts):
            for picture, want, prompt in zip(pictures, single, prompts, strict=True):
                difference = np.abs(np.asarray(picture, dtype=int) - np.asarray(want, dtype=int))
                assert matches(picture, prompt) and difference.max() <= 1, (prompt, difference.max())

    def test_naive_slices_draw_noise(self):
        for right in run_ranks(2, naive_worker, 2, held_out_prompts(8)):
            assert right == 0

    @parameterized.expand([("generator",), ("latents",), ("prompt",), ("schedule",)])
    def test_inputs_of_one_rank_perturbed(self, what):
        results = run_ranks(3, perturbed_worker, 3, what)
        said = {
            "generator": "different generators (seed 0 on rank 0, seed 1 on rank 1, seed 2 on rank 2)",
            "latents": "different inputs to FluxTransformer2DModel: hidden_states is [1, 256, 32] float32 (",
            "prompt": "different inputs to FluxTransformer2DModel: ",
            "schedule": "different schedules: timesteps is [8] float32 (",
        }
        for result in results:
            assert said[what] in result["message"] and "\n" not in result["message"], result["message"]
            assert result["clean"] and result["right"], results
        assert max(result["unguarded"] for result in results) > 1e-3, results

    def test_pipelines_that_share_a_scheduler(self):
        assert run_ranks(2, two_pipelines_worker, 2) == [[True] * 4] * 2

    def test_a_pipeline_that_cannot_be_parallel_stays_as_it_was(self):
        for message, changed in run_ranks(2, half_planned_worker, 2):
            assert "Linear has no tensor-parallel plan" in message and not changed

    def test_gradients_and_compilation_through_the_guard(self):
        for gradient, compiled in run_ranks(2, gradient_and_compile_worker, 2):
            assert gradient <= 1e-5 and compiled <= 1e-5, (gradient, compiled)

    def test_different_numbers_of_prompts(self):
        for message in run_ranks(2, shapes_worker, 2):
            assert "inputs to FluxTransformer2DModel: hidden_states is [1, 256, 32] float32" in message, message

    def test_different_numbers_of_steps(self):
        for message in run_ranks(2, steps_worker, 2):
            assert message == (
                "the ranks were given different schedules: the number of steps is 3 on rank 0 and 4 on rank 1"
            )

    def test_checkpoint_in_bf16(self):
        for single, sharded in run_ranks(2, checkpoint_worker, str(EMBEDDED_MODEL), 2, "cpu"):
            assert 1e-4 < single < 0.1 and sharded <= BF16_RATIO * single, (sharded, single)

    def test_it_is_small_and_complete(self):
        files = [file for file in EMBEDDED_MODEL.rglob("*") if file.is_file()]
        assert sum(file.stat().st_size for file in files) < 8_000_000
        assert not [file for file in files if file.suffix in (".bin", ".pt", ".ckpt", ".pkl")]
        assert {"README.md", "LICENSE", "model_index.json"} <= {file.name for file in files}


def matches_answer(answer: tuple, prompt: str) -> bool:
    from check_shapes import parse_prompt

    return answer == tuple(parse_prompt(prompt))


@require_torch_multi_accelerator
class TestEmbeddedFluxAccelerator(unittest.TestCase):
    def test_checkpoint_in_bf16(self):
        device = torch.accelerator.current_accelerator().type
        for single, sharded in run_ranks(2, checkpoint_worker, str(EMBEDDED_MODEL), 2, device, device=device):
            assert 1e-4 < single < 0.1 and sharded <= BF16_RATIO * single, (sharded, single)


@slow
@require_torch_multi_accelerator
class TestFluxCheckpointsSlow(unittest.TestCase):
    """Real checkpoints, tp=2 and tp=4 against one GPU of the same run."""

    @parameterized.expand([(name, tp) for name in ("FLUX.1-dev", "FLUX.1-schnell") for tp in (2, 4)])
    def test_checkpoint_in_bf16(self, name, tp):
        count = torch.accelerator.device_count()
        if tp > count:
            pytest.skip(f"tp={tp} needs {tp} accelerators, found {count}")
        path = fetch(f"black-forest-labs/{name}")
        device = torch.accelerator.current_accelerator().type
        for single, sharded in run_ranks(tp, checkpoint_worker, path, tp, device, device=device, timeout=1800):
            assert 1e-4 < single < 0.1 and sharded <= BF16_RATIO * single, (sharded, single)


if __name__ == "__main__":
    unittest.main()
