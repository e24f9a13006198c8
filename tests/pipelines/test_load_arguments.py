"""What `load_pipeline` refuses before it reads, by one line that says what is meant, on every rank."""

import json
import shutil
import tempfile
import unittest
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline, FluxTransformer2DModel, GGUFQuantizationConfig, PipelineQuantizationConfig
from parameterized import parameterized

from diffusers_rocm import ParallelConfig, TensorParallelConfig, load_pipeline, parallelize
from diffusers_rocm.pipelines.model_folder import EMBEDDED_MODEL
from diffusers_rocm.pipelines.quantization import torchao_config

from ..testing_utils import message_of, run_ranks


INT8 = torchao_config("int8")
# Each is given to all ranks; a part of what they say.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a config of diffusers": (
        {"parallel_config": diffusers.ContextParallelConfig(ring_degree=2)},
        "must be a config of diffusers_rocm",
    ),
    "a mapping for a config": ({"parallel_config": {"tp": 2}}, "must be a config of diffusers_rocm"),
    "a torch.device": ({"device": torch.device("cpu")}, "device must be 'cuda' or 'cpu'"),
    "a dtype of integers": ({"torch_dtype": torch.int8}, "torch_dtype must be of floating point"),
    "a word for a dtype": ({"torch_dtype": "bfloat16"}, "torch_dtype must be of floating point"),
    "a list of modes": ({"text_encoders": ["shard"]}, "text_encoders must be a word, or a mapping"),
    "a name for a pipeline": ({"pipeline": "FluxPipeline"}, "pipeline must be a class of pipelines"),
    "a word for a quantisation": ({"quantization_config": "int8"}, "quantization_config must be a TorchAoConfig"),
    "torchao's own config": ({"quantization_config": INT8.quant_type}, "quantization_config must be a TorchAoConfig"),
    "GGUF": ({"quantization_config": GGUFQuantizationConfig()}, "quantises by torchao"),
    "GGUF of one component": (
        {"quantization_config": PipelineQuantizationConfig(quant_mapping={"transformer": GGUFQuantizationConfig()})},
        "and not by gguf",
    ),
    "no such component": (
        {"quantization_config": PipelineQuantizationConfig(quant_mapping={"transformr": INT8})},
        "quantization_config names 'transformr', and there are",
    ),
    "a text encoder": (
        {"quantization_config": PipelineQuantizationConfig(quant_mapping={"text_encoder": INT8})},
        "transformers can be quantised, not its text_encoder",
    ),
}


def refused_worker() -> dict[str, str]:
    found = {
        name: message_of(load_pipeline, EMBEDDED_MODEL, **{"parallel_config": ParallelConfig(tp=2), **given})
        for name, (given, _) in REFUSED.items()
    }
    transformer = FluxTransformer2DModel.from_pretrained(EMBEDDED_MODEL, subfolder="transformer")
    config, given = ParallelConfig(tp=2), {"transformer": transformer, "quantization_config": INT8}
    found["passed in"] = message_of(load_pipeline, EMBEDDED_MODEL, config, **given)
    without = {} if dist.get_rank() == 0 else {"text_encoder_2": None}
    found["on one rank"] = message_of(load_pipeline, EMBEDDED_MODEL, config, text_encoders="shard", **without)
    found["from_pretrained"] = message_of(
        FluxTransformer2DModel.from_pretrained,
        EMBEDDED_MODEL,
        subfolder="transformer",
        parallel_config=TensorParallelConfig(2),
        quantization_config=diffusers.QuantoConfig(),
    )
    return found


def broken_worker(folder: str) -> str:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        load_pipeline(folder, ParallelConfig(tp=2))
    return str(caught.value)


def later_worker() -> dict[str, str]:
    """Calls on a pipeline whose weights are not all there, or not whole."""
    found = {}
    for mode in ("shard", "first-rank"):
        pipe = load_pipeline(EMBEDDED_MODEL, ParallelConfig(tp=2), text_encoders=mode)
        for name in ("add_adapter", "load_adapter", "save_pretrained"):
            found[f"{mode} {name}"] = message_of(getattr(pipe.text_encoder, name), None)
        pipe.transformer.disable_parallelism()
    pipe = load_pipeline(EMBEDDED_MODEL, ParallelConfig(tp=2), offload="disk")
    for name in ("add_adapter", "enable_group_offload"):
        found[f"disk {name}"] = message_of(getattr(pipe.transformer, name), None)
    found["disk fuse_lora"] = message_of(pipe.fuse_lora)
    return found


def sequential_worker() -> str:
    pipe = DiffusionPipeline.from_pretrained(EMBEDDED_MODEL)
    pipe.enable_sequential_cpu_offload(device="cpu")
    return message_of(parallelize, pipe, ParallelConfig(tp=2))


def no_folder(folder: Path) -> None:
    shutil.rmtree(folder / "tokenizer_2")


def no_config(folder: Path) -> None:
    (folder / "text_encoder_2" / "config.json").unlink()


def cut_index(folder: Path) -> None:
    file = folder / "model_index.json"
    file.write_text(file.read_text()[:100])


def cut_weight_map(folder: Path) -> None:
    (folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json").write_text('{"weight_map": {')


def no_weight_map(folder: Path) -> None:
    (folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json").write_text('{"metadata": {}}')


def no_shard(folder: Path) -> None:
    weight_map = {"proj_out.bias": "absent-00001.safetensors"}
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": weight_map}))


BROKEN = {
    no_folder: "has no folder tokenizer_2",
    no_config: "text_encoder_2 has no config.json",
    cut_index: "model_index.json is not JSON",
    cut_weight_map: "index.json is not JSON",
    no_weight_map: "index.json says of no tensor in which file it is",
    no_shard: "absent-00001.safetensors is not there, which diffusion_pytorch_model.safetensors.index.json says has "
    "proj_out.bias",
}


class TestLoadArguments(unittest.TestCase):
    def test_refused_on_every_rank(self):
        expected = {name: part for name, (_, part) in REFUSED.items()}
        expected["passed in"] = "transformer was passed in"
        expected["on one rank"] = "arguments of load_pipeline(): text_encoder_2 is nothing on rank 0 and 'NoneType'"
        expected["from_pretrained"] = "weights of quanto cannot be cut"
        for found in run_ranks(2, refused_worker):
            assert found.keys() == expected.keys()
            for name, message in found.items():
                assert expected[name] in message, (name, message)

    @parameterized.expand([(each.__name__, each) for each in BROKEN])
    def test_broken_folders(self, _, damage):
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(shutil.copytree(EMBEDDED_MODEL, Path(parent, "model")))
            damage(folder)
            for message in run_ranks(2, broken_worker, str(folder)):
                assert BROKEN[damage] in message, message

    def test_what_needs_whole_weights(self):
        for found in run_ranks(2, later_worker):
            for name, message in found.items():
                part = "offload='disk' reads them anew" if name.startswith("disk") else "is not whole on every rank"
                assert part in message, (name, message)

    def test_weights_that_accelerate_holds(self):
        for message in run_ranks(2, sequential_worker):
            assert "accelerate holds them" in message and "enable_group_offload" in message, message
