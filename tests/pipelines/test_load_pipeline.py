"""`load_pipeline`: the pictures of one process, what is refused, and what fits; offloading of parallel pipelines."""

import contextlib
import importlib.util
import itertools
import json
import shutil
import tempfile
import unittest
from dataclasses import replace
from pathlib import Path
from unittest import mock

import diffusers
import pytest
import torch
import torch.distributed as dist
import transformers
from diffusers import DiffusionPipeline, FluxTransformer2DModel, PipelineQuantizationConfig
from packaging.version import Version
from parameterized import parameterized
from safetensors.torch import load_file, save_file

from diffusers_rocm import ParallelConfig, TensorParallelConfig, load_pipeline, parallelize
from diffusers_rocm.distributed.axis import Axis
from diffusers_rocm.distributed.quantized import is_quantized, parts
from diffusers_rocm.loaders.text_encoder import load_sharded_text_encoder
from diffusers_rocm.pipelines import load, text_encoders
from diffusers_rocm.pipelines.model_folder import EMBEDDED_MODEL
from diffusers_rocm.pipelines.quantization import torchao_config
from diffusers_rocm.pipelines.text_encoders import load_text_encoder
from diffusers_rocm.registration import DTYPE_ARGUMENT

from ..models.testing_utils.parallelism import FLOAT32_BAR
from ..testing_utils import message_of, relative_l2, require_torch_multi_accelerator, run_ranks
from .test_text_encoders import CPU, save_quantized, tiny


PROMPT = {"prompt": "a small red circle", "num_inference_steps": 2, "height": 64, "width": 64, "output_type": "np"}


def pictures(pipe: DiffusionPipeline) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    return torch.from_numpy(pipe(generator=torch.Generator().manual_seed(0), **PROMPT).images)


def pipeline_worker(mesh: dict[str, int], modes: list[str | dict[str, str]]) -> list[dict]:
    wanted = pictures(DiffusionPipeline.from_pretrained(EMBEDDED_MODEL))
    results = []
    for mode in modes:
        pipe = load_pipeline(EMBEDDED_MODEL, ParallelConfig(**mesh), text_encoders=mode)
        encoders = {"text_encoder": pipe.text_encoder, "text_encoder_2": pipe.text_encoder_2}
        results.append(
            {
                "errors": [relative_l2(pictures(pipe), wanted) for _ in range(2)],
                "modes": pipe.text_encoder_modes,
                "weights": {name: sum(x.numel() for x in each.parameters()) for name, each in encoders.items()},
                "saved": {
                    name: message_of(encoders[name].save_pretrained, "nowhere")
                    for name, mode in pipe.text_encoder_modes.items()
                    if mode != "replicate"
                },
            }
        )
        pipe.transformer.disable_parallelism()
    return results


def offload_worker() -> list[float]:
    """Models that accelerate brings to their device for their turn, before and after they became parallel."""
    wanted, errors = pictures(DiffusionPipeline.from_pretrained(EMBEDDED_MODEL)), []
    pipe = load_pipeline(EMBEDDED_MODEL, ParallelConfig(ulysses=2), text_encoders="shard")
    pipe.enable_model_cpu_offload(device="cpu")
    errors += [relative_l2(pictures(pipe), wanted) for _ in range(2)]
    for mesh in ({"tp": 2}, {"ulysses": 2}):
        pipe = DiffusionPipeline.from_pretrained(EMBEDDED_MODEL)
        pipe.enable_model_cpu_offload(device="cpu")
        parallelize(pipe, ParallelConfig(**mesh))
        before = pipe.transformer.parallelism
        errors += [relative_l2(pictures(pipe), wanted) for _ in range(2)]
        assert pipe.transformer.parallelism is before and hasattr(pipe.transformer, "_hf_hook")
        pipe.remove_all_hooks()
        pipe.transformer.disable_parallelism()
        errors.append(relative_l2(pictures(pipe), wanted))
    return errors


def damage(folder: Path, component: str, how: str) -> str:
    """Damage one tensor of a component; its name."""
    file = next((folder / component).glob("*.safetensors"))
    tensors = load_file(file)
    name = "decoder.conv_in.weight" if component == "vae" else sorted(tensors)[-1]
    if how == "missing":
        del tensors[name]
    elif how == "shape":
        tensors[name] = torch.zeros(3, 1)
    file.unlink()
    if how == "pickle":
        torch.save(tensors, file.with_suffix(".bin"))
        return "safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    if how == "cut off":
        file.write_bytes(file.read_bytes()[:-8])
        return ""
    return name


def damaged_worker(folder: str, text_encoders: str, degrees: dict[str, int]) -> str:
    with pytest.raises((ValueError, RuntimeError, OSError)) as caught:
        load_pipeline(folder, ParallelConfig(**degrees), text_encoders=text_encoders)
    return str(caught.value)


def variant_worker(folder: str) -> list[float]:
    wanted = pictures(DiffusionPipeline.from_pretrained(EMBEDDED_MODEL))
    return [
        relative_l2(pictures(load_pipeline(folder, ParallelConfig(tp=2), text_encoders=mode, variant="fp16")), wanted)
        for mode in ("shard", "first-rank", "replicate")
    ]


def adapters_worker() -> dict[str, str]:
    """A LoRA of a text encoder, which may be anywhere, and of the transformer; what is refused leaves nothing."""
    torch.manual_seed(0)
    layer = "text_encoder.text_model.encoder.layers.0.self_attn.q_proj"
    state = {f"{layer}.lora_A.weight": torch.randn(4, 64), f"{layer}.lora_B.weight": torch.randn(64, 4)}
    layer = "transformer.transformer_blocks.0.attn.to_q"
    state |= {f"{layer}.lora_A.weight": torch.randn(4, 128), f"{layer}.lora_B.weight": torch.randn(128, 4)}
    pipe = DiffusionPipeline.from_pretrained(EMBEDDED_MODEL)
    pipe.load_lora_weights(dict(state))
    wanted, results = pictures(pipe), {}
    for mode in ("replicate", "shard", "first-rank"):
        pipe = load_pipeline(EMBEDDED_MODEL, ParallelConfig(tp=2), text_encoders=mode)
        if mode == "replicate":
            pipe.load_lora_weights(dict(state))
            results[mode] = relative_l2(pictures(pipe), wanted)
        else:
            before = pictures(pipe)
            results[mode] = message_of(pipe.load_lora_weights, dict(state))
            of_transformer = {name: x for name, x in state.items() if name.startswith("transformer.")}
            with pytest.raises((OSError, RuntimeError)):  # one rank alone cannot read it
                where = "/nowhere" if dist.get_rank() == 1 else of_transformer
                pipe.load_lora_weights(where, weight_name="absent.safetensors")
            assert pipe.get_list_adapters() == {} and torch.equal(pictures(pipe), before)
    return results


def already_parallel_worker() -> list[float]:
    """A transformer that was read slice by slice, in a pipeline of its own or one that is loaded."""
    wanted = pictures(DiffusionPipeline.from_pretrained(EMBEDDED_MODEL))
    errors = []
    for make in (
        lambda it: DiffusionPipeline.from_pretrained(EMBEDDED_MODEL, transformer=it),
        lambda it: load_pipeline(EMBEDDED_MODEL, ParallelConfig(tp=2), transformer=it),
    ):
        config = TensorParallelConfig(tp=2)
        it = FluxTransformer2DModel.from_pretrained(EMBEDDED_MODEL, subfolder="transformer", parallel_config=config)
        pipe = make(it)
        if not hasattr(pipe, "parallel_call"):
            other = message_of(parallelize, pipe, ParallelConfig(ulysses=2))
            assert "is parallel already" in other and it.parallelism.axes.tp.size == 2, other
            parallelize(pipe, ParallelConfig(tp=2))
        errors.append(relative_l2(pictures(pipe), wanted))
        assert hasattr(pipe, "parallel_call") and "is parallel already" in message_of(parallelize, pipe, config)
    return errors


def different_arguments_worker() -> dict[str, str]:
    """What is given to one rank alone."""
    first, config = dist.get_rank() == 0, ParallelConfig(tp=2)
    given = {
        "text_encoders": "shard" if first else "replicate",
        "offload": "model" if first else "nothing",
        "vae": "tile" if first else "replicate",
    }
    messages = {
        name: message_of(load_pipeline, EMBEDDED_MODEL, config, **{name: value}) for name, value in given.items()
    }
    with pytest.raises((ValueError, RuntimeError)) as caught:
        load_pipeline(EMBEDDED_MODEL if first else "/nowhere/at/all", config)
    return messages | {"folder": str(caught.value)}


def refusals_worker(folder: str) -> dict[str, str]:
    config = ParallelConfig(tp=2)
    messages = {
        "mode": message_of(load_pipeline, EMBEDDED_MODEL, config, text_encoders="sharded"),
        "name": message_of(load_pipeline, EMBEDDED_MODEL, config, text_encoders={"text_encoder_3": "shard"}),
        "no folder": message_of(load_pipeline, folder, config),
        "class": message_of(
            load_text_encoder, transformers.BertModel, Path(folder), "shard", Axis.of_all(), CPU, torch.float32
        ),
        "vae": message_of(load_pipeline, EMBEDDED_MODEL, config, vae="tiles"),
        "offload": message_of(load_pipeline, EMBEDDED_MODEL, config, offload="all"),
        "dtype": message_of(load_pipeline, EMBEDDED_MODEL, config, dtype=torch.bfloat16),
        "misspelt": message_of(load_pipeline, EMBEDDED_MODEL, config, text_encoder_mode="shard"),
    }
    tiny("T5EncoderModel").save_pretrained(folder)
    dist.barrier()
    file = Path(folder, "model.safetensors")
    if dist.get_rank() == 1:  # one rank alone reads another file
        folder = f"{folder}/other"
        shutil.copytree(file.parent, folder)
        tensors = load_file(file)
        tensors["encoder.block.1.layer.0.SelfAttention.q.weight"] = torch.zeros(48, 39)
        save_file(tensors, f"{folder}/model.safetensors")
    with pytest.raises((ValueError, RuntimeError)) as caught:
        load_sharded_text_encoder(transformers.T5EncoderModel, Path(folder), Axis.of_all(), torch.float32)
    return {**messages, "shape": str(caught.value)}


def unknown_class_worker(folder: str) -> str:
    return message_of(load_pipeline, folder, ParallelConfig(tp=2))


def auto_worker() -> tuple[dict[str, str], int]:
    """The modes where there is no room, and how often that is said."""
    with mock.patch.object(text_encoders, "ROOM", 0), mock.patch.object(load.logger, "warning") as warning:
        pipe = load_pipeline(EMBEDDED_MODEL, ParallelConfig(tp=2), offload="none")
    return pipe.text_encoder_modes, sum("is 'shard'" in call.args[0] for call in warning.call_args_list)


def save_worker(folder: str) -> dict[str, str]:
    """Refused before anything is written."""
    messages = {}
    for name, options in {
        "shard": {"text_encoders": "shard"},
        "first-rank": {"text_encoders": "first-rank"},
        "quantised": {"quantization_config": torchao_config("int8")},
        "disk": {"offload": "disk"},
    }.items():
        pipe = load_pipeline(EMBEDDED_MODEL, ParallelConfig(tp=2), **options)
        messages[name] = message_of(pipe.save_pretrained, folder)
    return messages


def quantized_worker() -> list[dict]:
    """By a config for the denoisers, and by one that names them; against the quantised pipeline of one process."""
    of_all = torchao_config("int8")
    exact = pictures(DiffusionPipeline.from_pretrained(EMBEDDED_MODEL))
    whole = FluxTransformer2DModel.from_pretrained(
        EMBEDDED_MODEL, subfolder="transformer", quantization_config=of_all, **{DTYPE_ARGUMENT: torch.float32}
    )
    wanted, results = pictures(DiffusionPipeline.from_pretrained(EMBEDDED_MODEL, transformer=whole)), []
    for config in (of_all, PipelineQuantizationConfig(quant_mapping={"transformer": of_all})):
        pipe = load_pipeline(EMBEDDED_MODEL, ParallelConfig(tp=2), quantization_config=config)
        models = pipe.transformer, pipe.text_encoder, pipe.vae
        results.append(
            {
                "distance": relative_l2(pictures(pipe), wanted),
                "own": relative_l2(wanted, exact),
                "quantized": [sum(map(is_quantized, each.parameters())) for each in models],
            }
        )
    return results


@torch.no_grad()
def waiting_worker(offload: str, quantized: bool) -> dict:
    """On GPUs: the picture, and where the transformer's weights are when it is made."""
    config = torchao_config("int8") if quantized else None
    wanted = load_pipeline(EMBEDDED_MODEL, ParallelConfig(tp=2), offload="none", quantization_config=config)
    pipe = load_pipeline(EMBEDDED_MODEL, ParallelConfig(tp=2), offload=offload, quantization_config=config)
    error = relative_l2(pictures(pipe), pictures(wanted))
    pipe.maybe_free_model_hooks()
    held = [part for x in pipe.transformer.parameters() for part in parts(x).values()]
    return {"error": error, "devices": sorted({part.device.type for part in held})}


@torch.no_grad()
def own_device_worker() -> tuple[float, str]:
    """diffusers' own call, without an argument."""
    wanted = pictures(load_pipeline(EMBEDDED_MODEL, ParallelConfig(tp=2), offload="none"))
    pipe = DiffusionPipeline.from_pretrained(EMBEDDED_MODEL)
    parallelize(pipe, ParallelConfig(tp=2))
    pipe.enable_model_cpu_offload()
    return relative_l2(pictures(pipe), wanted), str(pipe._execution_device)


@require_torch_multi_accelerator
class TestLoadPipelineAccelerator(unittest.TestCase):
    def test_models_wait_for_the_ranks_own_device(self):
        for rank, (error, device) in enumerate(run_ranks(2, own_device_worker, device="cuda")):
            assert error <= FLOAT32_BAR and device == f"cuda:{rank}", (error, device)

    @parameterized.expand(itertools.product(("none", "model", "group", "auto"), (False, True)))
    def test_offload(self, offload, quantized):
        for result in run_ranks(2, waiting_worker, offload, quantized, device="cuda"):
            assert result["error"] <= FLOAT32_BAR, result
            assert result["devices"] == (["cpu"] if offload in ("model", "group") else ["cuda"]), result


class TestLoadPipeline(unittest.TestCase):
    @unittest.skipUnless(importlib.util.find_spec("torchao"), "needs torchao")
    def test_quantized(self):
        for results in run_ranks(2, quantized_worker):
            for result in results:
                assert result["quantized"][0] > 10 and result["quantized"][1:] == [0, 0], result
                assert 1e-4 < result["distance"] <= 1.1 * result["own"], result

    @unittest.skipUnless(importlib.util.find_spec("torchao"), "needs torchao")
    def test_what_cannot_be_saved_writes_nothing(self):
        with tempfile.TemporaryDirectory() as parent:
            for messages in run_ranks(2, save_worker, f"{parent}/folder"):
                assert "save it from where it was read" in messages["shard"], messages
                assert "save it from where it was read" in messages["first-rank"], messages
                assert "FluxTransformer2DModel is quantised" in messages["quantised"], messages
                assert "save_pretrained() goes with weights that stay" in messages["disk"], messages
            assert not Path(parent, "folder").exists()

    def test_what_auto_became_is_said_once(self):
        for rank, (modes, said) in enumerate(run_ranks(2, auto_worker)):
            assert set(modes.values()) == {"shard"} and said == (2 if rank == 0 else 0), (modes, said)

    @parameterized.expand(
        [
            ("transformer", ["diffusers", "FluxTransformer9DModel"]),
            ("text_encoder_2", ["transformers", "T9EncoderModel"]),
            ("scheduler", ["diffusers", "NoScheduler"]),
            ("_class_name", "Flux9Pipeline"),
        ]
    )
    def test_classes_that_are_not_there(self, name, entry):
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(shutil.copytree(EMBEDDED_MODEL, Path(parent, "model")))
            index = folder / "model_index.json"
            index.write_text(json.dumps(json.loads(index.read_text()) | {name: entry}))
            for message in run_ranks(2, unknown_class_worker, str(folder)):
                assert f"{entry[-1] if isinstance(entry, list) else entry}, which" in message, message
                assert "does not have" in message, message

    @parameterized.expand([({"tp": 2},), ({"ulysses": 2},), ({"cfg": 1, "dp": 2},)])
    def test_pictures_are_those_of_one_process(self, mesh):
        names = ("text_encoder", "text_encoder_2")
        modes = ["shard", "first-rank", "auto", {"text_encoder": "replicate", "text_encoder_2": "shard"}]
        whole = DiffusionPipeline.from_pretrained(EMBEDDED_MODEL)
        whole = {name: sum(x.numel() for x in getattr(whole, name).parameters()) for name in names}
        for rank, results in enumerate(run_ranks(2, pipeline_worker, mesh, modes)):
            for mode, result in zip(modes, results, strict=True):
                assert max(result["errors"]) <= FLOAT32_BAR, (mode, result["errors"])
                for name in names:
                    wanted = mode[name] if isinstance(mode, dict) else mode.replace("auto", "replicate")
                    wanted = "replicate" if "dp" in mesh else wanted  # nobody to share a picture with
                    assert result["modes"][name] == wanted
                    weights = result["weights"][name]
                    if wanted == "replicate" or wanted == "first-rank" and rank == 0:
                        assert weights == whole[name]
                    elif wanted == "first-rank":
                        assert weights == 1 and "save it from where" in result["saved"][name]
                    else:
                        assert weights < 0.7 * whole[name] and "save it from where" in result["saved"][name]

    def test_models_that_wait_on_the_host(self):
        for errors in run_ranks(2, offload_worker):
            assert max(errors) <= FLOAT32_BAR, errors

    @parameterized.expand(
        [
            (component, mode, how, degrees)
            for component, mode, degrees in (
                ("text_encoder_2", "shard", {"tp": 2}),
                ("text_encoder_2", "first-rank", {"tp": 2}),
                ("text_encoder", "replicate", {"tp": 2}),
                ("vae", "replicate", {"tp": 2}),
                ("transformer", "replicate", {"tp": 2}),
                ("transformer", "replicate", {"ulysses": 2}),
            )
            for how in ("missing", "shape", "cut off", "pickle")
        ]
    )
    def test_damaged_files(self, component, mode, how, degrees):
        """Named on every rank, whatever reads them."""
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent, "model")
            shutil.copytree(EMBEDDED_MODEL, folder)
            name = damage(folder, component, how)
            for message in run_ranks(2, damaged_worker, str(folder), mode, degrees):
                assert name in message and (how != "cut off" or "safetensors" in message), message

    def test_a_variant_that_some_components_have(self):
        """One has it beside other weights, one alone, and two have it not."""
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(shutil.copytree(EMBEDDED_MODEL, Path(folder, "copy")))
            for component in ("transformer", "text_encoder_2"):
                file = next((copy / component).glob("*.safetensors"))
                weights = load_file(file)
                file.rename(file.with_suffix(".fp16.safetensors"))
                if component == "transformer":
                    zeros = {name: torch.zeros_like(x) for name, x in weights.items()}
                    save_file(zeros, file, metadata={"format": "pt"})
            for errors in run_ranks(2, variant_worker, str(copy)):
                assert max(errors) <= FLOAT32_BAR, errors

    @unittest.skipIf(
        Version(diffusers.__version__) < Version("0.42"), "older diffusers find no layers in CLIP of transformers 5"
    )
    def test_adapters(self):
        for results in run_ranks(2, adapters_worker):
            assert results.pop("replicate") <= FLOAT32_BAR, results
            for mode, message in results.items():
                assert f"text_encoders='{mode}'" in message and "{'text_encoder': 'replicate'}" in message, message

    def test_transformer_that_is_parallel_already(self):
        for errors in run_ranks(2, already_parallel_worker):
            assert max(errors) <= FLOAT32_BAR, errors

    def test_ranks_with_different_arguments(self):
        for messages in run_ranks(2, different_arguments_worker):
            for name in ("text_encoders", "offload", "vae"):
                assert f"different arguments of load_pipeline(): {name} is" in messages[name], messages
            assert "/nowhere/at/all" in messages["folder"], messages

    def test_bad_input_is_an_error_on_all_ranks(self):
        with tempfile.TemporaryDirectory() as folder:
            results = run_ranks(2, refusals_worker, folder)
        for result in results:
            assert "must be one of 'auto', 'shard', 'first-rank', 'replicate'; got 'sharded'" in result["mode"]
            assert "has no text encoder 'text_encoder_3', only text_encoder, text_encoder_2" in result["name"]
            assert "has no model_index.json" in result["no folder"]
            assert "no plan shards the text encoder BertModel" in result["class"]
            assert "vae must be one of" in result["vae"]
            assert "offload must be one of 'auto', 'none', 'model', 'group', 'disk'; got 'all'" in result["offload"]
            assert "takes an argument dtype; torch_dtype is meant" in result["dtype"]
            assert "takes an argument text_encoder_mode; text_encoders is meant" in result["misspelt"]
            assert "SelfAttention.q.weight is [48, 39] in the checkpoint, and [48, 40]" in result["shape"]

    @parameterized.expand(
        [
            ("all fits", 4, 4, 0, "replicate"),
            ("not one for each rank on the host", 4, 2, 0, "first-rank"),
            ("not beside the rest of the pipeline", 4, 4, 1, "first-rank"),
            ("no whole one beside it", 4, 4, 1.5, "shard"),
            ("no whole one on a device", 1, 4, 0, "shard"),
            ("nor parts of it, quantised", 1, 4, 0, "first-rank"),
        ]
    )
    def test_auto_takes_what_fits_with_the_least_traffic(self, name, device, host, beside, wanted):
        """Two ranks of one host, whose memory is so many times the encoder's, as is what each has to load besides."""
        size = 4 * sum(x.numel() for x in tiny("T5EncoderModel").parameters())
        memory = mock.Mock(virtual_memory=lambda: mock.Mock(available=host * size))
        module = mock.Mock(mem_get_info=lambda _: (0, device * size))
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(text_encoders, "psutil", memory),
            mock.patch.object(torch, "get_device_module", lambda _: module),
            mock.patch.object(text_encoders, "all_gather_int64", lambda row, axis: row[None]),
            mock.patch.object(text_encoders, "fail_together", lambda what, axis: contextlib.nullcontext()),
        ):
            tiny("T5EncoderModel").save_pretrained(folder)
            if "quantised" in name:
                save_quantized(folder)
            axis = replace(Axis.single("replica"), size=2)
            cuda = torch.device("cuda")
            found = text_encoders._fitting(
                transformers.T5EncoderModel, Path(folder), axis, cuda, torch.float32, None, int(beside * size)
            )
        assert found == wanted


if __name__ == "__main__":
    unittest.main()
