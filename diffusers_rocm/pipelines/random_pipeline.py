"""A FLUX pipeline of real size with random weights, on disk: what loading and memory can be measured with."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.utils import SAFE_WEIGHTS_NAME

from .model_folder import EMBEDDED_MODEL


# What FLUX.1-dev's configs have otherwise than those of the embedded model.
FLUX_DEV: dict[str, dict[str, Any]] = {
    "transformer": {
        "attention_head_dim": 128, "num_attention_heads": 24, "num_layers": 19, "num_single_layers": 38,
        "in_channels": 64, "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": True,
        "axes_dims_rope": [16, 56, 56],
    },
    "text_encoder": {
        "vocab_size": 49408, "hidden_size": 768, "intermediate_size": 3072, "projection_dim": 768,
        "num_attention_heads": 12, "num_hidden_layers": 12,
    },
    "text_encoder_2": {
        "vocab_size": 32128, "d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_heads": 64, "num_layers": 24,
    },
    "vae": {
        "block_out_channels": [128, 256, 512, 512], "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4, "layers_per_block": 2, "latent_channels": 16,
        "norm_num_groups": 32, "scaling_factor": 0.3611, "shift_factor": 0.1159, "sample_size": 1024,
    },
}  # fmt: skip

SHARD_BYTES = 2 * 2**30

_INDEX = json.loads((EMBEDDED_MODEL / "model_index.json").read_text())


def write_random_flux(
    folder: Path, configs: Mapping[str, Mapping[str, Any]] = FLUX_DEV, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write the pipeline: the embedded one's tokenizers, and models of these configs with normal weights.

    At most two gigabytes are in memory at a time. What is there already stays.
    """
    write_flux_configs(folder, configs)
    for name in configs:
        config = json.loads((folder / name / "config.json").read_text())
        library, cls = _INDEX[name]
        with torch.device("meta"):
            if library == "diffusers":
                model, weights = getattr(diffusers, cls).from_config(config), SAFETENSORS_WEIGHTS_NAME
            else:
                made = getattr(transformers, cls)
                model, weights = made(made.config_class(**config)), SAFE_WEIGHTS_NAME
        file = folder / name / weights
        if not file.with_name(f"{file.name}.index.json").exists():  # which comes last
            _write(model, file, dtype)


def write_flux_configs(folder: Path, configs: Mapping[str, Mapping[str, Any]] = FLUX_DEV) -> None:
    """All but the weights."""
    shutil.copytree(EMBEDDED_MODEL, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    for name, changes in configs.items():
        file = folder / name / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes, indent=2))


def _write(model: nn.Module, file: Path, dtype: torch.dtype) -> None:
    weight_map, total = {}, 0
    for number, names in enumerate(_shards(model, dtype)):
        shard = {name: _random(name, model.get_parameter(name).shape, dtype) for name in names}
        into = file.with_name(f"{file.stem}-{number:05d}.safetensors")
        save_file(shard, into, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, into.name)
        total += sum(x.nbytes for x in shard.values())
    described = {"metadata": {"total_size": total}, "weight_map": weight_map}
    file.with_name(f"{file.name}.index.json").write_text(json.dumps(described, indent=2))


def _shards(model: nn.Module, dtype: torch.dtype) -> Iterator[list[str]]:
    names, size = [], 0
    for name, parameter in model.named_parameters():  # tied ones once
        if names and size + parameter.numel() * dtype.itemsize > SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += parameter.numel() * dtype.itemsize
    yield names


def _random(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.empty(shape, dtype=dtype, device=device).normal_(0, 0.02)
    return (x + ("norm" in name and name.endswith("weight"))).cpu()
