"""The Python blocks of the pages run, on as many ranks as they are for, and do what one process does."""

import functools
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel, SD3Transformer2DModel, WanPipeline
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from diffusers_rocm import ParallelConfig, TensorParallelConfig, parallelize
from diffusers_rocm.models.plans.context_plan import ContextParallelPlan, gather, split
from diffusers_rocm.pipelines.model_folder import EMBEDDED_MODEL

from .commands.test_generate_video import save_wan
from .models.testing_utils.common import BaseModelTesterConfig
from .models.testing_utils.parallelism import FLOAT32_BAR
from .models.testing_utils.plans import PlanTesterMixin
from .test_docs import PAGES, blocks
from .testing_utils import relative_l2, run_ranks


# With kernels of a GPU, and in the versions that have the bug.
NEEDS_GPUS = {("docs/bug.md", 0)}
SMALL = {"height": 64, "width": 64, "num_inference_steps": 2}
BFLOAT16 = {"torch_dtype": torch.bfloat16}
# Pixels of pictures in bfloat16.
PIXEL_BAR = 0.02


def run_block(page: str, number: int, **given: Any) -> dict[str, Any]:
    """The names that a block leaves, which takes some as given. The embedded model stands for the published one."""
    code = blocks(page, "python")[number].replace("black-forest-labs/FLUX.1-dev", str(EMBEDDED_MODEL))
    exec(compile(code, f"{page}, block {number}", "exec"), given)
    return given


def tiny(**options: Any) -> FluxTransformer2DModel:
    return FluxTransformer2DModel.from_pretrained(EMBEDDED_MODEL, subfolder="transformer", **options).eval()


def quantized(model: FluxTransformer2DModel) -> FluxTransformer2DModel:
    quantize_(model, Int8WeightOnlyConfig())
    return model


def in_parallel(model: FluxTransformer2DModel) -> FluxTransformer2DModel:
    model.enable_parallelism(config=TensorParallelConfig(tp=4))
    return model


@torch.no_grad()
def answer(transformer: FluxTransformer2DModel) -> torch.Tensor:
    generator, config = torch.Generator().manual_seed(0), transformer.config
    sizes = (64, config["in_channels"]), (8, config["joint_attention_dim"]), (config["pooled_projection_dim"],)
    image, text, pooled = (torch.randn(1, *size, generator=generator).to(transformer.dtype) for size in sizes)
    return transformer(
        image,
        encoder_hidden_states=text,
        pooled_projections=pooled,
        timestep=torch.tensor([0.5]).to(image),
        img_ids=torch.stack([torch.zeros(64), torch.arange(64) // 8, torch.arange(64) % 8], 1),
        txt_ids=torch.zeros(8, 3),
        return_dict=False,
    )[0].float()


def small_pictures() -> mock._patch:
    """FLUX pictures of a size and a number of steps for a test, whatever the block leaves to the defaults."""
    call = FluxPipeline.__call__

    @functools.wraps(call)
    def small(self, *args, **kwargs):
        self.set_progress_bar_config(disable=True)
        return call(self, *args, **{**SMALL, **kwargs, "num_inference_steps": 2})

    return mock.patch.object(FluxPipeline, "__call__", small)


def draw(pipe: FluxPipeline, prompt: str, seed: int, **call: Any) -> np.ndarray:
    pipe.set_progress_bar_config(disable=True)
    return np.asarray(pipe(prompt, generator=torch.Generator().manual_seed(seed), **SMALL, **call).images[0])


def embedded(**options: Any) -> FluxPipeline:
    return FluxPipeline.from_pretrained(EMBEDDED_MODEL, **options)


def distance(image: Any, wanted: np.ndarray) -> float:
    return relative_l2(torch.from_numpy(np.asarray(image)), torch.from_numpy(wanted))


@torch.no_grad()
def video(pipe: WanPipeline) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    size = {"height": 32, "width": 48, "num_frames": 5, "num_inference_steps": 2, "max_sequence_length": 16}
    return pipe("a red circle", **size, output_type="latent", generator=torch.Generator().manual_seed(0)).frames


def readme_worker() -> float:
    with small_pictures():
        image = run_block("README.md", 0)["image"]
    return distance(image, draw(embedded(**BFLOAT16), "a lighthouse in a storm", 0))


def readme_sequence_worker() -> float:
    pipe = run_block("README.md", 1, pipe=embedded())["pipe"]
    assert pipe.transformer.parallelism.axes.context.size == 4
    return distance(draw(pipe, "a red circle", 0), draw(embedded(), "a red circle", 0))


def readme_hybrid_worker() -> float:
    guided = {"prompt": "a red circle", "negative_prompt": "a green star", "true_cfg_scale": 3.0, "seed": 0}
    pipe = run_block("README.md", 2, pipe=embedded())["pipe"]
    assert pipe.transformer.parallelism.axes.cfg.size == 2
    return distance(draw(pipe, **guided), draw(embedded(), **guided))


def memory_worker() -> np.ndarray:
    with small_pictures():
        return np.asarray(run_block("docs/memory.md", 0)["image"])


def tensor_parallel_worker() -> float:
    transformer = run_block("docs/tensor_parallel.md", 0, path=EMBEDDED_MODEL)["transformer"]
    assert transformer.transformer_blocks[0].attn.to_q.weight.shape == (32, 128)
    return relative_l2(answer(transformer.float()), answer(tiny(**BFLOAT16).float()))


def context_parallel_worker() -> float:
    return relative_l2(
        answer(run_block("docs/context_parallel.md", 0, transformer=tiny())["transformer"]), answer(tiny())
    )


def hybrid_worker(folder: str) -> float:
    pipe = run_block("docs/hybrid.md", 0, path=folder)["pipe"]
    return relative_l2(video(pipe), video(WanPipeline.from_pretrained(folder)))


def replicas_worker() -> list[float]:
    pipe, seeds = embedded(), [3, 5, 4]
    prompts = ["a red circle", "a green star", "a white cross"]
    parallelize(pipe, ParallelConfig(dp=2))
    with small_pictures():
        images = run_block("docs/hybrid.md", 1, pipe=pipe, torch=torch, prompts=prompts, seeds=seeds)["images"]
    wanted = [draw(embedded(), *each) for each in zip(prompts, seeds, strict=True)]
    return [distance(*each) for each in zip(images, wanted, strict=True)]


def quantization_worker() -> list[float]:
    """Of the three ways: from the answer of one process that holds the same quantised weights."""
    wanted = answer(quantized(tiny(**BFLOAT16)))
    first = run_block("docs/memory.md", 1, path=EMBEDDED_MODEL)
    second = run_block("docs/memory.md", 2, **{**first, "transformer": in_parallel(tiny(**BFLOAT16))})
    third = run_block("docs/memory.md", 3, **{**first, "transformer": quantized(tiny(**BFLOAT16))})
    return [relative_l2(answer(names["transformer"]), wanted) for names in (first, second, third)]


class TestPython(unittest.TestCase):
    def test_readme(self):
        assert max(run_ranks(4, readme_worker)) <= PIXEL_BAR
        assert max(run_ranks(4, readme_sequence_worker)) <= PIXEL_BAR
        assert max(run_ranks(8, readme_hybrid_worker)) <= PIXEL_BAR

    def test_memory(self):
        first, *others = run_ranks(4, memory_worker)
        assert first.std() > 1 and all(np.array_equal(first, each) for each in others)  # one seed for all

    def test_tensor_parallel(self):
        assert max(run_ranks(4, tensor_parallel_worker)) <= FLOAT32_BAR

    def test_context_parallel(self):
        assert max(run_ranks(4, context_parallel_worker)) <= FLOAT32_BAR

    def test_hybrid(self):
        with tempfile.TemporaryDirectory() as folder:
            save_wan(Path(folder), from_image=False)
            assert max(run_ranks(8, hybrid_worker, folder)) <= FLOAT32_BAR

    def test_replicas(self):
        assert max(map(max, run_ranks(2, replicas_worker))) <= PIXEL_BAR

    def test_quantization(self):
        for errors in run_ranks(4, quantization_worker):
            assert max(errors) <= 0.02, errors

    def test_log_sum_exp(self):
        out, lse = torch.zeros(1, 5, 2, 8), torch.zeros(1, 5, 2)
        assert run_block("docs/bug.md", 1, out=out, lse=lse)["lse"].shape == (1, 5, 2, 1)
        assert run_block("docs/bug.md", 1, out=out, lse=lse[..., None])["lse"].shape == (1, 5, 2, 1)

    def test_adding_a_model(self):
        run_block("docs/adding_a_model.md", 0, ContextParallelPlan=ContextParallelPlan, gather=gather, split=split)
        names = (BaseModelTesterConfig, PlanTesterMixin, SD3Transformer2DModel, unittest)
        names = run_block("docs/adding_a_model.md", 1, **{each.__name__: each for each in names})
        assert issubclass(names["TestSD3Transformer"], unittest.TestCase)

    def test_each_block_runs_or_needs_gpus(self):
        source = Path(__file__).read_text()
        for page in PAGES:
            for number, _ in enumerate(blocks(page, "python")):
                runs = f'run_block("{page}", {number}' in source
                assert runs != ((page, number) in NEEDS_GPUS), (page, number)


if __name__ == "__main__":
    unittest.main()
