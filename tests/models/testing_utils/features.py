"""What diffusers' models can be given besides parallelism, and the ways of being parallel: each with each."""

import dataclasses
import functools
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxPipeline, TorchAoConfig
from peft import LoraConfig
from safetensors.torch import load_file
from torch import nn
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    quantize_,
)

from diffusers_rocm import ParallelConfig, load_pipeline
from diffusers_rocm.distributed.quantized import is_quantized, parts
from diffusers_rocm.pipelines.model_folder import EMBEDDED_MODEL
from diffusers_rocm.registration import DTYPE_ARGUMENT

from ...pipelines.test_vae import pipeline_worker as vae_worker
from ...testing_utils import relative_l2, run_ranks
from ..transformers.test_models_transformer_flux import FluxTransformerTesterConfig
from .common import randn


MESHES: dict[str, dict[str, int]] = {
    "TP 2": {"tp": 2},
    "Ulysses 2": {"ulysses": 2},
    "TP 2 x Ulysses 2": {"ulysses": 2, "tp": 2},
}

CONFIG = FluxTransformerTesterConfig()

KINDS = {
    "int8": Int8WeightOnlyConfig(version=2),
    "int8 dynamic": Int8DynamicActivationInt8WeightConfig(version=2),
    "fp8": Float8WeightOnlyConfig(),
    "int4 by groups": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(8)),
}
# Activations are rounded too: a last bit that another order of a sum changes moves one over to the next integer.
DYNAMIC = ("int8 dynamic",)


def quantize(model: nn.Module, kind: str) -> nn.Module:
    """The same Linears of a whole model and of a sharded one."""

    def is_taken(module: nn.Module, path: str) -> bool:
        if not isinstance(module, nn.Linear) or path == "proj_out":
            return False
        whole = module.sharding.shapes["weight"] if hasattr(module, "sharding") else module.weight.shape
        return "groups" not in kind or whole[1] % 8 == 0

    quantize_(model, KINDS[kind], is_taken)
    return model


def lora(model: nn.Module, name: str = "one", seed: int = 0, **kwargs: Any) -> None:
    """Of every Linear in a block, about half as large as its weight."""
    with torch.device("meta"):
        whole = CONFIG.model_class(**CONFIG.get_init_dict())
    state = {}
    for each, (path, module) in enumerate(whole.named_modules(), seed):
        if isinstance(module, nn.Linear) and "blocks" in path:
            outputs, inputs = module.weight.shape
            state[f"{path}.lora_A.weight"] = randn(4, inputs, seed=each) / inputs**0.5
            state[f"{path}.lora_B.weight"] = randn(outputs, 4, seed=each + 1000) * 0.25
    model.load_lora_adapter(state, prefix=None, adapter_name=name, **kwargs)


another = functools.partial(lora, name="two", seed=3000)
swap = functools.partial(lora, seed=5000, hotswap=True)


def dora(model: nn.Module) -> None:
    torch.manual_seed(0)
    targets = ["to_q", "to_out.0", "proj_out"]
    model.add_adapter(LoraConfig(r=4, target_modules=targets, use_dora=True, init_lora_weights=False), "one")


def scale(model: nn.Module) -> None:
    model.set_adapters(["one", "two"], [0.6, -0.8])


def fuse(model: nn.Module) -> None:
    model.fuse_lora(lora_scale=0.7)
    model.unload_lora()


def unfuse(model: nn.Module) -> None:
    model.fuse_lora(lora_scale=0.7)
    model.unfuse_lora()


def unload(model: nn.Module) -> None:
    model.unload_lora()


def group_offload(level: str, **kwargs: Any) -> Callable[[nn.Module], None]:
    def offload(model: nn.Module) -> None:
        blocks = {"num_blocks_per_group": 1} if level == "block_level" else {}
        cpu = torch.device("cpu")
        model.enable_group_offload(cpu, cpu, offload_type=level, **blocks, **kwargs)

    return offload


@dataclasses.dataclass(frozen=True)
class Feature:
    """What is done to a model before parallelism is enabled, and after.

    Attributes:
        needs: a package.
        loads: the model is read from a checkpoint, by these arguments, parallel already.
        stored: the arguments of `save_pretrained` by which that was written.
        refused: part of what is said where weights are sharded, if it is not to be had there.
        rounds: the ranks' weights, with tensor parallelism, or all activations are rounded otherwise than those of one
            process.
        unsaved, not_whole: part of what `save_pretrained`, or with tensor parallelism `disable_parallelism`, refuses.
    """

    before: tuple[Callable[[nn.Module], None], ...] = ()
    after: tuple[Callable[[nn.Module], None], ...] = ()
    needs: str | None = None
    loads: dict[str, Any] | None = None
    stored: dict[str, Any] = dataclasses.field(default_factory=dict)
    refused: str | None = None
    rounds: bool = False
    unsaved: str | None = None
    not_whole: str | None = None


def to_gguf(model: nn.Module) -> None:
    """Linears of blocks as diffusers has them of a GGUF file, in 8 bits."""
    import gguf
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    kind = gguf.GGMLQuantizationType.Q8_0
    for parent, name, linear in _linears_of_blocks(model):
        made = GGUFLinear(linear.in_features, linear.out_features, linear.bias is not None, torch.float32)
        packed = torch.from_numpy(gguf.quants.quantize(linear.weight.detach().numpy(), kind))
        made.weight, made.bias = GGUFParameter(packed, quant_type=kind), linear.bias
        setattr(parent, name, made)


def to_bits(bits: int) -> Callable[[nn.Module], None]:
    """Linears of blocks as diffusers has them with bitsandbytes."""

    def change(model: nn.Module) -> None:
        from bitsandbytes.nn import Linear4bit, Linear8bitLt

        for parent, name, linear in _linears_of_blocks(model):
            size = linear.in_features, linear.out_features, linear.bias is not None
            if bits == 8:
                made = Linear8bitLt(*size, has_fp16_weights=False, threshold=6.0)
            else:
                made = Linear4bit(*size, quant_type="nf4", compute_dtype=torch.float32)
            made.load_state_dict(linear.state_dict())
            setattr(parent, name, made.to("cpu"))

    return change


def _linears_of_blocks(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    found = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    parents = [(path.rpartition("."), linear) for path, linear in found if "blocks" in path]
    return [(model.get_submodule(parent), name, linear) for (parent, _, name), linear in parents]


def by(kind: str) -> Callable[[nn.Module], None]:
    return functools.partial(quantize, kind=kind)


QUANTIZED = "is quantised, and is not saved while it is parallel"
NOT_WHOLE = "were quantised and cannot be made whole"
FEATURES: dict[str, Feature] = {
    "alone": Feature(),
    "read in slices": Feature(loads={}),
    "read in slices from many files of a variant, in a subfolder": Feature(
        loads={"variant": "fp32", "subfolder": "part"}, stored={"variant": "fp32", "max_shard_size": "300KB"}
    ),
    "LoRA, then parallel": Feature(before=(lora,)),
    "parallel, then LoRA": Feature(after=(lora,)),
    "parallel, then LoRA, fused": Feature(after=(lora, fuse)),
    "parallel, then LoRA, fused and unfused": Feature(after=(lora, unfuse)),
    "parallel, then LoRA, unloaded for another": Feature(after=(lora, unload, another)),
    "parallel, then LoRA, swapped": Feature(after=(lora, swap)),
    "LoRA, then parallel, then a second LoRA, scales of each": Feature(before=(lora,), after=(another, scale)),
    "parallel, then DoRA": Feature(after=(dora,), refused="DoRA cannot be added"),
    "group offload of blocks, then parallel": Feature(before=(group_offload("block_level"),)),
    "parallel, then group offload of blocks": Feature(after=(group_offload("block_level"),)),
    "group offload of leaves, then parallel": Feature(before=(group_offload("leaf_level"),)),
    "parallel, then group offload of leaves": Feature(after=(group_offload("leaf_level"),)),
    "parallel, then group offload of leaves, low_cpu_mem_usage": Feature(
        after=(group_offload("leaf_level", low_cpu_mem_usage=True),)
    ),
    **{
        f"{kind}, then parallel": Feature(before=(by(kind),), rounds=kind in DYNAMIC, unsaved=QUANTIZED)
        for kind in KINDS
    },
    **{
        f"parallel, then {kind}": Feature(after=(by(kind),), rounds=True, unsaved=QUANTIZED, not_whole=NOT_WHOLE)
        for kind in ("int8", "int8 dynamic", "fp8")
    },
    "parallel, then int4 by groups": Feature(after=(by("int4 by groups"),), unsaved=QUANTIZED),
    "read in slices, each to int8": Feature(
        loads={"quantization_config": TorchAoConfig(KINDS["int8"])},
        rounds=True,
        unsaved=QUANTIZED,
        not_whole=NOT_WHOLE,
    ),
    "GGUF, then parallel": Feature(before=(to_gguf,), needs="gguf", refused="GGUFLinear", unsaved=QUANTIZED),
    "bitsandbytes in 8 bits, then parallel": Feature(
        before=(to_bits(8),), needs="bitsandbytes", refused="Linear8bitLt", unsaved=QUANTIZED
    ),
    "bitsandbytes in 4 bits, then parallel": Feature(
        before=(to_bits(4),), needs="bitsandbytes", refused="Linear4bit", unsaved=QUANTIZED
    ),
    "int8 and LoRA, then parallel": Feature(before=(by("int8"), lora), unsaved=QUANTIZED),
    "int8, then parallel, then LoRA": Feature(before=(by("int8"),), after=(lora,), unsaved=QUANTIZED),
    "int8, then parallel, then group offload of leaves": Feature(
        before=(by("int8"),), after=(group_offload("leaf_level"),), unsaved=QUANTIZED
    ),
}


def _said(function: Callable, *args: Any) -> str:
    """What it refused, or nothing."""
    try:
        function(*args)
    except ValueError as error:
        return str(error)
    return ""


def _same(model: nn.Module, wanted: nn.Module) -> bool:
    found, other = model.state_dict(), wanted.state_dict()
    if found.keys() != other.keys():
        return False
    for name, x in other.items():
        own, wanted = parts(found[name]), parts(x)
        if own.keys() != wanted.keys():
            return False
        if not all(torch.allclose(own[key].double(), part.double(), 1e-5, 1e-6) for key, part in wanted.items()):
            return False
    return True


@torch.no_grad()
def feature_worker(name: str, degrees: dict[str, int], folder: str) -> dict:
    """The error against the same in one process, that one's against float32; what saving and disabling make of it."""
    feature, config, inputs = FEATURES[name], CONFIG, CONFIG.get_inputs(1)
    plain, whole, model = (config.get_model() for _ in range(3))
    dtype = {DTYPE_ARGUMENT: torch.float32}
    if feature.loads is not None:
        whole = config.model_class.from_pretrained(folder, **feature.loads, **dtype)
        parallel = {"parallel_config": ParallelConfig(**degrees)}
        model = config.model_class.from_pretrained(folder, **feature.loads, **parallel, **dtype)
    else:
        for change in (*feature.before, *feature.after):
            change(whole)
        for change in feature.before:
            change(model)
        enable = functools.partial(model.enable_parallelism, config=ParallelConfig(**degrees))
        for change in (enable, *(functools.partial(change, model) for change in feature.after)):
            if refused := _said(change):
                return {"refused": refused}
    exact, wanted, output = (config.get_output(each, inputs) for each in (plain, whole, model))
    result = {
        "error": relative_l2(output, wanted),
        "own": relative_l2(wanted, exact),
        "quantized": sum(map(is_quantized, model.parameters())),
    }
    shared = Path(folder, "-".join([*name.replace(",", "").split(), *degrees]))  # all ranks save into one
    result["unsaved"] = _said(model.save_pretrained, shared)
    if not result["unsaved"] and any("lora" in path for path, _ in whole.named_parameters()):
        # diffusers does not read what it writes of a model with adapters: what it writes must be the same.
        own = Path(f"{shared}-whole-{torch.distributed.get_rank()}")
        whole.save_pretrained(own)
        found, other = (load_file(next(each.glob("*.safetensors"))) for each in (shared, own))
        same = found.keys() == other.keys()
        result["saved"] = max(relative_l2(found[key], x) for key, x in other.items()) if same else torch.inf
    elif not result["unsaved"]:
        again = config.model_class.from_pretrained(shared, **dtype)
        result["saved"] = relative_l2(config.get_output(again, inputs), wanted)
    result["not_whole"] = _said(model.disable_parallelism)
    if not result["not_whole"]:
        result["whole"] = relative_l2(config.get_output(model, inputs), wanted) if _same(model, whole) else torch.inf
    return result


VIDEO = "VAE: tile, of a video"  # of Wan, which nothing is loaded for
# What `load_pipeline` is given, and what is called on the pipeline then.
PIPELINES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    **{f"text encoders: {mode}": ({"text_encoders": mode}, ()) for mode in ("shard", "first-rank", "replicate")},
    "VAE: first-rank": ({"vae": "first-rank"}, ()),
    "VAE: tile": ({"vae": "tile"}, ()),
    "VAE: replicate": ({"vae": "replicate"}, ()),
    VIDEO: ({}, ()),
    "model offload": ({}, ("enable_model_cpu_offload",)),
    "disk offload": ({"offload": "disk"}, ()),
}


@torch.no_grad()
def pipeline_worker(name: str, degrees: dict[str, int]) -> dict:
    """The error of a picture of several VAE tiles against that of one process."""
    if name == VIDEO:
        return {"error": max(vae_worker("wan", degrees, "tile")["errors"])}
    arguments, calls = PIPELINES[name]

    def picture(pipe: FluxPipeline) -> torch.Tensor:
        pipe.set_progress_bar_config(disable=True)
        pipe.vae.enable_tiling()
        return pipe(
            "a red circle",
            height=192,
            width=192,
            num_inference_steps=2,
            max_sequence_length=16,
            generator=torch.Generator().manual_seed(0),
            output_type="pt",
        ).images

    wanted = picture(FluxPipeline.from_pretrained(EMBEDDED_MODEL, **{DTYPE_ARGUMENT: torch.float32}))
    pipe = load_pipeline(EMBEDDED_MODEL, ParallelConfig(**degrees), device="cpu", **arguments)
    for call in calls:
        getattr(pipe, call)(device="cpu")
    return {"error": relative_l2(picture(pipe), wanted)}


def run(name: str, mesh: str) -> list[dict]:
    """What each rank answers."""
    degrees = MESHES[mesh]
    world = math.prod(degrees.values())
    if name in PIPELINES:
        return run_ranks(world, pipeline_worker, name, degrees)
    with tempfile.TemporaryDirectory() as folder:
        feature = FEATURES[name]
        CONFIG.get_model().save_pretrained(Path(folder, (feature.loads or {}).get("subfolder", "")), **feature.stored)
        return run_ranks(world, feature_worker, name, degrees, folder)


def table_row(name: str, by_mesh: dict[str, list[dict]]) -> dict[str, Any]:
    """Of the results of all ranks, the worst."""
    of_pipeline = name in PIPELINES
    row: dict[str, Any] = {"name": name, "of_pipeline": of_pipeline}
    row["rounds"] = not of_pipeline and FEATURES[name].rounds
    for mesh, results in by_mesh.items():
        if any("refused" in result for result in results):
            row[mesh] = None
            continue
        row[mesh] = max(result["error"] / result["own"] if row["rounds"] else result["error"] for result in results)
        for of in ("unsaved", "not_whole"):
            if any(result.get(of) for result in results):
                row[of] = row.get(of, []) + [mesh]
    return row
