"""`load_pipeline(offload="disk")`: the pictures of one process, and never the weights of two components at a time."""

import functools
import itertools
import shutil
import tempfile
import unittest
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline, FluxControlNetModel, FluxControlNetPipeline
from parameterized import parameterized
from torch import nn

from diffusers_rocm import ParallelConfig, load_pipeline
from diffusers_rocm.distributed.axis import Axis
from diffusers_rocm.distributed.quantized import parts
from diffusers_rocm.pipelines import load
from diffusers_rocm.pipelines.denoisers import denoisers_of
from diffusers_rocm.pipelines.model_folder import EMBEDDED_MODEL
from diffusers_rocm.pipelines.quantization import torchao_config

from ..models.testing_utils.parallelism import FLOAT32_BAR
from ..testing_utils import message_of, relative_l2, require_torch_multi_accelerator, run_ranks
from .test_load_pipeline import PROMPT, pictures
from .test_text_encoders import CPU
from .testing_utils import PIPELINES, build, latents


def held(pipe: DiffusionPipeline) -> list[str]:
    """The components that have their weights."""
    models = {name: each for name, each in pipe.components.items() if isinstance(each, nn.Module)}
    return [
        name
        for name, each in models.items()
        if any(not part.is_meta for x in each.parameters() for part in parts(x).values())
    ]


@torch.no_grad()
def disk_worker(mesh: dict[str, int], options: dict[str, str], quantized: bool = False) -> dict:
    config = torchao_config("int8") if quantized else None
    given = {"quantization_config": config, **options}
    wanted = pictures(load_pipeline(EMBEDDED_MODEL, ParallelConfig(**mesh), offload="none", **given))
    pipe = load_pipeline(EMBEDDED_MODEL, ParallelConfig(**mesh), offload="disk", **given)
    seen = [held(pipe)]
    for name in ("text_encoder", "text_encoder_2", "transformer"):
        module = getattr(pipe, name)
        leaves = [x for x in module.modules() if x is not module and not list(x.children())]
        for leaf in leaves[:1]:  # a text encoder that the first rank has is nothing on the others
            leaf.register_forward_pre_hook(lambda *_: seen.append(held(pipe)))
    errors = [relative_l2(pictures(pipe), wanted) for _ in range(2)]
    seen.append(held(pipe))
    devices = {x.device.type for x in pipe.vae.parameters()}
    return {"errors": errors, "seen": seen, "devices": sorted(devices), "execution": pipe._execution_device.type}


@torch.no_grad()
def encoded_before_worker() -> list[float]:
    """Of two pictures in a row: between them one rank has decoded, and given up the transformer, and the other not."""
    generator = torch.Generator().manual_seed(1)
    embeds = {name: torch.randn(shape, generator=generator) for name, shape in ENCODED.items()}

    def made(pipe: DiffusionPipeline) -> torch.Tensor:
        pipe.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(0)
        how = {"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "pt"}
        return pipe(generator=generator, **embeds, **how).images

    wanted, pipe = (
        load_pipeline(EMBEDDED_MODEL, ParallelConfig(tp=2), offload=offload, vae="first-rank")
        for offload in ("none", "disk")
    )
    return [relative_l2(made(pipe), made(wanted)) for _ in range(2)]


def check(result: dict, device: str) -> None:
    assert max(result["errors"]) <= FLOAT32_BAR, result
    assert result["seen"][0] == [] and result["seen"][-1] == ["vae"], result
    assert all(len(each) == 1 for each in result["seen"][1:]), result
    assert {each[0] for each in result["seen"][1:]} >= {"transformer", "vae"}, result
    assert result["devices"] == [device] and result["execution"] == device, result


def refusals_worker(folder: str) -> dict[str, str | None]:
    pipe = load_pipeline(EMBEDDED_MODEL, ParallelConfig(tp=2), offload="disk")
    messages = {
        "save": message_of(pipe.transformer.save_pretrained, folder),
        "whole": message_of(pipe.transformer.disable_parallelism),
        "state": message_of(pipe.transformer.state_dict),
        "encoder": message_of(pipe.text_encoder.state_dict),
        "lora": message_of(pipe.load_lora_weights, folder),
        "to": message_of(pipe.to, "cpu"),
        "model": message_of(pipe.enable_model_cpu_offload, device="cpu"),
        "graph": message_of(load_pipeline, EMBEDDED_MODEL, ParallelConfig(tp=2), offload="disk", graph=True),
    }
    assert pipe.device.type == pipe.transformer.device.type == "cpu"
    return messages


# What a prompt of the embedded model is encoded as.
ENCODED = {"prompt_embeds": (1, 16, 64), "pooled_prompt_embeds": (1, 64)}
# What is done to a model, and whether while it has its weights.
CHANGES = {
    "added": lambda model: model.proj_out.register_parameter("added", nn.Parameter(torch.zeros(1))),
    "cast": lambda model: nn.Module.to(model, torch.bfloat16),
    "in place": lambda model: model.proj_out.bias.zero_(),
    "replaced": lambda model: setattr(model.proj_out, "bias", nn.Parameter(torch.zeros(1))),
}


@torch.no_grad()
def changes_worker(name: str, held: bool) -> str | None:
    pipe = load_pipeline(EMBEDDED_MODEL, ParallelConfig(tp=2), offload="disk")
    steps = [] if held else CHANGES[name](pipe.transformer)

    def after_the_last_step(*_: object) -> None:
        steps.append(1)
        if len(steps) == PROMPT["num_inference_steps"]:
            CHANGES[name](pipe.transformer)

    if held:
        pipe.transformer.register_forward_hook(after_the_last_step)
    return message_of(pictures, pipe)


@torch.no_grad()
def freed_worker() -> tuple[int, list[str]]:
    """The transformer's weights, by who still has them when the VAE decodes."""
    pipe = load_pipeline(EMBEDDED_MODEL, ParallelConfig(tp=2), offload="disk")
    seen = {}

    def look(*_: object) -> None:
        seen.update({name: weakref.ref(x) for name, x in pipe.transformer.named_parameters()})

    pipe.transformer.transformer_blocks[0].register_forward_pre_hook(look)
    pictures(pipe)
    return len(seen), [name for name, x in seen.items() if x() is not None]


def removed_worker(folder: str, component: str) -> str:
    """After a picture one rank's file is gone."""
    own = Path(folder, str(dist.get_rank()))
    shutil.copytree(EMBEDDED_MODEL, own)
    pipe = load_pipeline(own, ParallelConfig(tp=2), offload="disk", text_encoders="replicate")
    pictures(pipe)
    if dist.get_rank() == 1:
        for file in Path(own, component).glob("*.safetensors"):
            file.unlink()
    with pytest.raises((OSError, ValueError, RuntimeError)) as caught:
        pictures(pipe)
    return str(caught.value)


@torch.no_grad()
def compiled_worker() -> list[float]:
    wanted = pictures(load_pipeline(EMBEDDED_MODEL, ParallelConfig(tp=2), offload="none"))
    pipe = load_pipeline(EMBEDDED_MODEL, ParallelConfig(tp=2), offload="disk")
    pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    return [relative_l2(pictures(pipe), wanted) for _ in range(2)]


def small_host_worker() -> tuple[list[list[str]], list[str]]:
    """By itself, where a host has room for one byte."""
    world = Axis.of_all()
    with mock.patch.object(psutil, "virtual_memory", lambda: SimpleNamespace(available=1)):
        pipes = [load_pipeline(EMBEDDED_MODEL, ParallelConfig(tp=2), offload=mode) for mode in ("auto", "none")]
        # One rank alone has less room on its device.
        sizes = (100, 100 if dist.get_rank() else 300)
        device, module = torch.device("cuda"), SimpleNamespace(mem_get_info=lambda _: (0, sizes[1]))
        with mock.patch.object(torch, "get_device_module", lambda _: module):
            found = [load._past_the_host(mine, device, world) for mine in (50, 51)]
    return [held(pipe) for pipe in pipes], [*found, load._past_the_host(1, CPU, world)]


@torch.no_grad()
def controlnet_worker(folder: str) -> tuple[float, list[str]]:
    made, image = [], torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    for offload in ("none", "disk"):
        pipe = load_pipeline(folder, ParallelConfig(tp=2), offload=offload)
        call = functools.partial(pipe.__call__, control_image=image)
        pipe.set_progress_bar_config(disable=True)
        made.append(torch.from_numpy(call(generator=torch.Generator().manual_seed(0), **PROMPT).images))
    return relative_l2(made[1], made[0]), sorted(held(pipe))


class WithoutEncoders:
    """Loads a pipeline that has nothing but its denoisers."""

    def __init__(self, pipe: DiffusionPipeline):
        self._cls, self._nothing = type(pipe), {name: None for name, each in pipe.components.items() if each is None}

    def from_pretrained(self, folder: Path, **kwargs) -> DiffusionPipeline:
        return self._cls.from_pretrained(folder, **kwargs, **self._nothing)


@torch.no_grad()
def family_worker(name: str, folder: str) -> tuple[list[float], set[str]]:
    whole, call, seen = build(name), PIPELINES[name].call(), set()
    if dist.get_rank() == 0:
        whole.save_pretrained(folder)
    dist.barrier()
    pipe = load_pipeline(folder, ParallelConfig(tp=2), offload="disk", pipeline=WithoutEncoders(whole))
    pipe.set_progress_bar_config(disable=True)
    for denoiser in denoisers_of(pipe):
        leaf = next(x for x in denoiser.modules() if x is not denoiser and not list(x.children()))
        leaf.register_forward_pre_hook(lambda *_: seen.add(" ".join(held(pipe))))
    wanted = latents(whole, call)
    return [relative_l2(latents(pipe, call), wanted) for _ in range(2)], seen


class TestDiskOffload(unittest.TestCase):
    @parameterized.expand(
        [
            ({"tp": 2}, {"text_encoders": "shard"}),
            ({"ulysses": 2}, {"text_encoders": "first-rank", "vae": "tile"}),
            ({"tp": 2}, {"text_encoders": "replicate", "vae": "first-rank"}),
            ({"dp": 2}, {}),
        ]
    )
    def test_one_component_at_a_time(self, mesh, options):
        for rank, result in enumerate(run_ranks(2, disk_worker, mesh, options)):
            if options.get("vae") == "first-rank" and rank == 1:  # which decodes nothing
                assert result["seen"].pop() == ["transformer"]
                result["seen"].append(["vae"])
                result["devices"] = ["cpu"]
            check(result, "cpu")

    def test_what_one_rank_has_given_up(self):
        for errors in run_ranks(2, encoded_before_worker):
            assert max(errors) <= FLOAT32_BAR, errors

    def test_quantized(self):
        pytest.importorskip("torchao")
        for result in run_ranks(2, disk_worker, {"tp": 2}, {}, True):
            check(result, "cpu")

    def test_refusals(self):
        with tempfile.TemporaryDirectory() as folder:
            for messages in run_ranks(2, refusals_worker, folder):
                assert "offloaded to disk" in messages["save"] and "offloaded to disk" in messages["whole"], messages
                assert "are on disk" in messages["state"] and "are on disk" in messages["encoder"], messages
                for name in ("lora", "to", "model"):
                    assert "goes with weights that stay" in messages[name], messages
                assert "use 'model'" in messages["graph"], messages

    @parameterized.expand(itertools.product(CHANGES, (False, True)))
    def test_changes_are_not_lost(self, name, held):
        for message in run_ranks(2, changes_worker, name, held):
            assert message is not None and "is not what was read, and would be read again" in message, message

    def test_nothing_holds_on_to_weights(self):
        for count, alive in run_ranks(2, freed_worker):
            assert count > 100 and alive == [], alive

    @parameterized.expand([("transformer",), ("text_encoder_2",)])
    def test_a_rank_that_cannot_read_again(self, component):
        with tempfile.TemporaryDirectory() as folder:
            fine, failed = run_ranks(2, removed_worker, folder, component)
        assert "rank 1 could not read the" in fine and ".safetensors" in failed, (fine, failed)

    @parameterized.expand(
        [("wan22", {"transformer", "transformer_2"}), ("sd3", {"transformer"}), ("z_image", {"transformer"})]
    )
    def test_families(self, name, wanted):
        with tempfile.TemporaryDirectory() as folder:
            for errors, seen in run_ranks(2, family_worker, name, folder):
                assert max(errors) <= FLOAT32_BAR and seen == wanted, (errors, seen)

    def test_compiled(self):
        for errors in run_ranks(2, compiled_worker):
            assert max(errors) <= FLOAT32_BAR, errors

    def test_by_itself(self):
        for (auto, none), found in run_ranks(2, small_host_worker):
            assert auto == [] and "transformer" in none
            assert found == ["none", "disk", "auto"], found

    def test_a_model_of_every_step(self):
        """It would be read for each step if it took turns with the transformer."""
        with tempfile.TemporaryDirectory() as folder:
            pipe = DiffusionPipeline.from_pretrained(EMBEDDED_MODEL)
            torch.manual_seed(0)
            controlnet = FluxControlNetModel.from_transformer(
                pipe.transformer,
                num_layers=1,
                num_single_layers=1,
                load_weights_from_transformer=False,
                **{name: pipe.transformer.config[name] for name in ("attention_head_dim", "num_attention_heads")},
            )
            for x in controlnet.parameters():
                x.data.normal_(std=0.1)
            FluxControlNetPipeline(**pipe.components, controlnet=controlnet).save_pretrained(folder)
            for error, kept in run_ranks(2, controlnet_worker, folder):
                assert error <= FLOAT32_BAR and kept == ["controlnet", "vae"], (error, kept)


@require_torch_multi_accelerator
class TestDiskOffloadAccelerator(unittest.TestCase):
    @parameterized.expand([(False,), (True,)])
    def test_one_component_at_a_time(self, quantized):
        for result in run_ranks(2, disk_worker, {"tp": 2}, {}, quantized, device="cuda"):
            check(result, "cuda")
