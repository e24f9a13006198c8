"""Loading a sharded model: each rank reads its slices, and an error of one rank is an error on all."""

import json
import tempfile
import unittest
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel
from parameterized import parameterized
from safetensors.torch import load_file, save_file
from torch import nn

from diffusers_rocm import ParallelConfig, TensorParallelConfig
from diffusers_rocm.distributed.quantized import parts
from diffusers_rocm.hooks.tensor_parallel import sharded_modules
from diffusers_rocm.loaders.stored_tensor import StoredTensor, stored_tensors
from diffusers_rocm.pipelines.quantization import torchao_config
from diffusers_rocm.registration import DTYPE_ARGUMENT

from ..models.testing_utils.common import BaseModelTesterConfig
from ..models.testing_utils.parallelism import FLOAT32_BAR, _clone_state, _same_state
from ..models.testing_utils.variants import variants
from ..models.transformers.test_models_transformer_flux import FluxTransformerTesterConfig
from ..models.transformers.test_models_transformer_wan import WanTransformerTesterConfig
from ..testing_utils import relative_l2, require_torch_accelerator, run_ranks, slow
from .testing_utils import elements_read


FILE = "diffusion_pytorch_model.safetensors"
# Names of tests of plans: packed projections, norms across heads, buffers, experts, key heads, convolutions, lists.
VARIANTS = (
    "FluxTransformer",
    "WanTransformer",
    "SD3Transformer",
    "HiDreamImageTransformer",
    "Lumina2Transformer",
    "SanaTransformer",
    "ZImageTransformer",
    "JoyImageEditTransformer",
)


@torch.no_grad()
def whole_worker(config: BaseModelTesterConfig, folder: str, degrees: dict[str, int], kwargs: dict) -> dict:
    """Load sharded, count what is read, compare the output, make it whole again and compare that."""
    reference = config.model_class.from_pretrained(folder, **kwargs)
    inputs = config.get_inputs(1)
    if reference.dtype != torch.float32:
        inputs = config.cast(inputs, reference.dtype)
    expected = config.get_output(reference, inputs)
    with elements_read() as read:
        model = config.model_class.from_pretrained(folder, parallel_config=ParallelConfig(**degrees), **kwargs)
    kept = sum(tensor.numel() for tensor in model.state_dict().values())
    error = relative_l2(config.get_output(model, inputs), expected)
    is_sharded, training = next(sharded_modules(model), None) is not None, model.training
    model.disable_parallelism()
    return {
        "error": error,
        "read": sum(read),
        "kept": kept,
        "sharded": is_sharded and not training,
        "restored": _same_state(model, _clone_state(reference)),
        "dtypes": {name: str(x.dtype) for name, x in model.state_dict().items()},
    }


def as_published(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of Z-Image under the names of its authors, whose q, k and v are one."""
    names = {"all_final_layer.2-1.": "final_layer.", "all_x_embedder.2-1.": "x_embedder."}
    names |= {".attention.to_out.0.": ".attention.out.", ".norm_q.": ".q_norm.", ".norm_k.": ".k_norm."}
    published = {}
    for name, tensor in state.items():
        if ".attention.to_q." in name:
            rest = [state[name.replace("to_q", other)] for other in ("to_k", "to_v")]
            name, tensor = name.replace("to_q", "qkv"), torch.cat([tensor, *rest])
        if ".to_k." not in name and ".to_v." not in name:
            for ours, theirs in names.items():
                name = name.replace(ours, theirs)
            published[f"model.diffusion_model.{name}"] = tensor.clone()
    return published


def flux_as_published(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """FLUX.1's weights under the names of its authors, who have q, k and v as one, with the MLP in single blocks."""
    names = {"proj_out": "final_layer.linear", "x_embedder": "img_in", "context_embedder": "txt_in"}
    for theirs, ours in {"time_in": "timestep", "guidance_in": "guidance", "vector_in": "text"}.items():
        names[f"time_text_embed.{ours}_embedder.linear_1"] = f"{theirs}.in_layer"
        names[f"time_text_embed.{ours}_embedder.linear_2"] = f"{theirs}.out_layer"
    double, single, joined = "transformer_blocks.0.", "single_transformer_blocks.0.", {}
    streams = {
        "img": ("", "to_out.0", ("norm_q", "norm_k"), ("to_q", "to_k", "to_v")),
        "txt": (
            "_context",
            "to_add_out",
            ("norm_added_q", "norm_added_k"),
            ("add_q_proj", "add_k_proj", "add_v_proj"),
        ),
    }
    for stream, (of, out, norms, linears) in streams.items():
        joined[f"double_blocks.0.{stream}_attn.qkv"] = [f"{double}attn.{each}" for each in linears]
        names |= {
            f"{double}norm1{of}.linear": f"double_blocks.0.{stream}_mod.lin",
            f"{double}ff{of}.net.0.proj": f"double_blocks.0.{stream}_mlp.0",
            f"{double}ff{of}.net.2": f"double_blocks.0.{stream}_mlp.2",
            f"{double}attn.{out}": f"double_blocks.0.{stream}_attn.proj",
            f"{double}attn.{norms[0]}": f"double_blocks.0.{stream}_attn.norm.query_norm",
            f"{double}attn.{norms[1]}": f"double_blocks.0.{stream}_attn.norm.key_norm",
        }
    names |= {
        f"{single}norm.linear": "single_blocks.0.modulation.lin",
        f"{single}proj_out": "single_blocks.0.linear2",
        f"{single}attn.norm_q": "single_blocks.0.norm.query_norm",
        f"{single}attn.norm_k": "single_blocks.0.norm.key_norm",
    }
    joined["single_blocks.0.linear1"] = [
        f"{single}{each}" for each in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
    ]
    published = {}
    for kind in ("weight", "bias"):
        for ours, theirs in names.items():
            if f"{ours}.{kind}" in state:
                name = f"{theirs}.scale" if theirs.endswith("_norm") else f"{theirs}.{kind}"
                published[name] = state[f"{ours}.{kind}"]
        for theirs, ours in joined.items():
            published[f"{theirs}.{kind}"] = torch.cat([state[f"{each}.{kind}"] for each in ours])
        scale, shift = state[f"norm_out.linear.{kind}"].chunk(2)
        published[f"final_layer.adaLN_modulation.1.{kind}"] = torch.cat([shift, scale])
    return published


def flux_single_file_worker(folder: str) -> tuple[bool, int, int, int]:
    """Whether all weights are right, and what `peak_worker` gives."""
    model, *sizes = peak_of(FluxTransformer2DModel.from_single_file, f"{folder}/published.safetensors", config=folder)
    model.disable_parallelism()
    expected = FluxTransformer2DModel.from_pretrained(folder, **{DTYPE_ARGUMENT: torch.bfloat16})
    return _same_state(model, _clone_state(expected)), *sizes


@torch.no_grad()
def single_file_worker(config: BaseModelTesterConfig, folder: str) -> dict:
    reference = config.model_class.from_pretrained(folder)
    model = config.model_class.from_single_file(
        f"{folder}/published.safetensors", config=folder, parallel_config=TensorParallelConfig(2)
    )
    inputs = config.get_inputs(1)
    error = relative_l2(config.get_output(model, inputs), config.get_output(reference, inputs))
    is_sharded = next(sharded_modules(model), None) is not None
    model.disable_parallelism()
    return {"error": error, "sharded": is_sharded, "restored": _same_state(model, _clone_state(reference))}


def message_worker(folder: str, of_rank_1: str | None = None, kwargs: Mapping = MappingProxyType({})) -> str:
    if of_rank_1 is not None and dist.get_rank() == 1:
        folder = of_rank_1
    with pytest.raises((ValueError, OSError, RuntimeError)) as caught:
        FluxTransformerTesterConfig.model_class.from_pretrained(
            folder, parallel_config=TensorParallelConfig(2), **kwargs
        )
    return str(caught.value)


def status(name: str) -> int:
    """Bytes, of this process's entry in /proc."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def peak_of(load: Callable[..., nn.Module], file: str, **kwargs) -> tuple[nn.Module, int, int, int]:
    """The model; how far the resident memory rises above what it was; the shard's bytes; its largest tensor's."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
    before = status("VmRSS")
    config = TensorParallelConfig(dist.get_world_size())
    model = load(file, parallel_config=config, **{DTYPE_ARGUMENT: torch.bfloat16}, **kwargs)
    sizes = [sum(part.nbytes for part in parts(tensor).values()) for tensor in model.state_dict().values()]
    return model, status("VmHWM") - before, sum(sizes), max(sizes)


def peak_worker(folder: str) -> tuple[int, int, int]:
    return peak_of(FluxTransformer2DModel.from_pretrained, folder)[1:]


def device_peak_worker(folder: str) -> tuple[int, int, int]:
    """What this process asks for of the device, which the ranks share; without what it had, and the allocator adds."""
    device = torch.accelerator.current_accelerator()
    module = torch.get_device_module(device)
    module.reset_peak_memory_stats()
    before = module.memory_stats().get("requested_bytes.all.current", 0)
    sizes = peak_of(FluxTransformer2DModel.from_pretrained, folder, device_map={"": device})[2:]
    return module.memory_stats()["requested_bytes.all.peak"] - before, *sizes


def quantized_peak_worker(folder: str) -> tuple[int, int, int]:
    from torchao.quantization import quantize_

    int8 = torchao_config("int8")
    quantize_(nn.Sequential(nn.Linear(32, 32)), int8.quant_type)  # what that imports is in memory before
    return peak_of(FluxTransformer2DModel.from_pretrained, folder, quantization_config=int8)[1:]


class TestLoad(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def save(self, config: BaseModelTesterConfig, dtype: torch.dtype = torch.float32, **kwargs) -> nn.Module:
        model = config.get_model(dtype=dtype)
        model.save_pretrained(self.folder, **kwargs)
        return model

    def check(self, config: BaseModelTesterConfig, degrees: dict[str, int], world: int, **kwargs) -> list[dict]:
        results = run_ranks(world, whole_worker, config, self.folder, degrees, kwargs)
        for result in results:
            assert result["sharded"] and result["restored"], result
            assert result["error"] <= (FLOAT32_BAR if not kwargs.get(DTYPE_ARGUMENT) else 0.05), result
            assert result["read"] == result["kept"], result
        return results

    @parameterized.expand(VARIANTS)
    def test_each_rank_reads_its_slices(self, name):
        found = variants()
        if name not in found:
            self.skipTest(f"this diffusers has no {name}")
        config, _ = found[name]
        size = sum(tensor.numel() for tensor in self.save(config).state_dict().values())
        for result in self.check(config, {"tp": 2}, 2):
            assert result["read"] < size, result

    def test_three_ranks_and_many_files(self):
        config = FluxTransformerTesterConfig()
        self.save(config, max_shard_size="300KB")
        assert len(list(Path(self.folder).glob("*.safetensors"))) > 3
        self.check(config, {"tp": 3}, 3)

    def test_a_hybrid_mesh(self):
        config = FluxTransformerTesterConfig()
        self.save(config)
        self.check(config, {"tp": 2, "ulysses": 2}, 4)

    def test_dtype_and_what_stays_in_float32(self):
        config = WanTransformerTesterConfig()
        self.save(config, variant="fp32")
        results = self.check(config, {"tp": 2}, 2, variant="fp32", **{DTYPE_ARGUMENT: torch.bfloat16})
        for result in results:
            kept = {name for name, dtype in result["dtypes"].items() if dtype == "torch.float32"}
            fp32 = WanTransformerTesterConfig.model_class._keep_in_fp32_modules
            assert kept == {name for name in result["dtypes"] if set(fp32) & set(name.split("."))}, kept
            assert set(result["dtypes"].values()) == {"torch.float32", "torch.bfloat16"}

    def test_without_a_dtype_a_checkpoint_in_half_becomes_float32(self):
        config = FluxTransformerTesterConfig()
        self.save(config, dtype=torch.bfloat16)
        for result in self.check(config, {"tp": 2}, 2):
            assert set(result["dtypes"].values()) == {"torch.float32"}

    @parameterized.expand([("one file", "100GB"), ("many files", "500MB")])
    @slow
    def test_peak_memory(self, name, max_shard_size):
        """The whole model is 2.3 GB; a rank reads a quarter of it, mapped files included."""
        self.save_wide(max_shard_size, num_layers=2, num_single_layers=3)
        for peak, shard, largest in run_ranks(4, peak_worker, self.folder):
            assert 550e6 < shard < 700e6, shard
            assert peak < shard + largest + 100e6, (peak, shard, largest)

    @require_torch_accelerator
    def test_peak_memory_of_the_device(self):
        self.save_wide(num_layers=2, num_single_layers=3)
        for peak, shard, largest in run_ranks(4, device_peak_worker, self.folder):
            assert 550e6 < shard < 700e6, shard
            assert shard <= peak < shard + largest, (peak, shard, largest)

    @slow
    def test_peak_memory_of_what_is_quantized(self):
        """Of the 2.3 GB a rank reads a quarter and keeps an eighth."""
        self.save_wide(num_layers=2, num_single_layers=3)
        for peak, shard, largest in run_ranks(4, quantized_peak_worker, self.folder):
            assert 250e6 < shard < 400e6, shard
            assert peak < shard + largest + 200e6, (peak, shard, largest)

    @slow
    def test_one_file_of_flux(self):
        """diffusers' conversion knows the real width alone: 0.9 GB, of which a rank reads a third."""
        model = self.save_wide(num_layers=1, num_single_layers=1, joint_attention_dim=64, guidance_embeds=True)
        save_file(flux_as_published(model.state_dict()), Path(self.folder, "published.safetensors"))
        del model
        for right, peak, shard, largest in run_ranks(3, flux_single_file_worker, self.folder):
            assert right and 250e6 < shard < 400e6, (right, shard)
            assert peak < shard + largest + 100e6, (peak, shard, largest)

    def save_wide(self, max_shard_size: str = "100GB", **config) -> FluxTransformer2DModel:
        torch.manual_seed(0)
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = FluxTransformer2DModel(**config)
        finally:
            torch.set_default_dtype(dtype)
        model.save_pretrained(self.folder, max_shard_size=max_shard_size)
        return model

    def test_one_file_of_the_authors(self):
        found = variants()
        if "ZImageTransformer" not in found:
            self.skipTest("this diffusers has no Z-Image")
        config, _ = found["ZImageTransformer"]
        published = as_published(self.save(config).state_dict())
        save_file(published, Path(self.folder, "published.safetensors"))
        for result in run_ranks(2, single_file_worker, config, self.folder):
            assert result["sharded"] and result["restored"], result
            assert result["error"] <= FLOAT32_BAR, result

    def test_a_tensor_that_is_missing(self):
        self.save(FluxTransformerTesterConfig())
        tensors = load_file(Path(self.folder, FILE))
        del tensors["proj_out.bias"]
        save_file(tensors, Path(self.folder, FILE))
        for message in run_ranks(2, message_worker, self.folder):
            assert "the checkpoint of this FluxTransformer2DModel lacks proj_out.bias" in message, message

    def test_a_tensor_of_another_shape(self):
        self.save(FluxTransformerTesterConfig())
        tensors = load_file(Path(self.folder, FILE))
        tensors["proj_out.bias"] = torch.zeros(3)
        save_file(tensors, Path(self.folder, FILE))
        for message in run_ranks(2, message_worker, self.folder):
            assert "proj_out.bias is [3] in the checkpoint, and [16] in this FluxTransf" in message, message

    def test_a_file_that_was_cut_on_one_rank(self):
        self.save(FluxTransformerTesterConfig())
        with tempfile.TemporaryDirectory() as cut:
            content = Path(self.folder, FILE).read_bytes()
            Path(cut, FILE).write_bytes(content[:-100])
            Path(cut, "config.json").write_bytes(Path(self.folder, "config.json").read_bytes())
            index = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            last = max((each["data_offsets"][1], name) for name, each in index.items() if name != "__metadata__")[1]
            first, second = run_ranks(2, message_worker, self.folder, cut)
        assert f"the file ends before the end of {last}" in second, second
        assert first.startswith("rank 1 could not load a FluxTransformer2DModel: ") and last in first, first

    def test_no_pickle(self):
        config = FluxTransformerTesterConfig()
        self.save(config, safe_serialization=False)
        for message in run_ranks(2, message_worker, self.folder):
            assert f"no file named {FILE}" in message, message
        for message in run_ranks(2, message_worker, self.folder, None, {"use_safetensors": False}):
            assert "never from pickles" in message, message

    def test_integers_for_a_weight(self):
        """As bitsandbytes keeps them, of the same shape."""
        self.save(FluxTransformerTesterConfig())
        tensors = load_file(Path(self.folder, FILE))
        tensors["proj_out.weight"] = tensors["proj_out.weight"].to(torch.int8)
        save_file(tensors, Path(self.folder, FILE))
        for message in run_ranks(2, message_worker, self.folder):
            assert "proj_out.weight is int8 in the checkpoint, quantised it seems" in message, message

    @parameterized.expand(
        [
            ({"low_cpu_mem_usage": False}, "leave it out"),
            ({"device_map": {"transformer_blocks": "cpu", "": "cpu"}}, "on one device each"),
        ]
    )
    def test_options_that_go_with_no_sharded_model(self, options, expected):
        self.save(FluxTransformerTesterConfig())
        for message in run_ranks(2, message_worker, self.folder, None, options):
            assert expected in message, message


class TestStoredTensor(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        generator = torch.Generator().manual_seed(0)
        self.tensors = {
            "a": torch.randn(7, 4, generator=generator),
            "b": torch.randn(5, 4, generator=generator),
            "scalar": torch.tensor(3.0),
        }
        save_file(self.tensors, Path(folder.name, FILE))
        self.stored = stored_tensors(Path(folder.name, FILE))
        self.read = 0
        read = StoredTensor.read
        self.addCleanup(setattr, StoredTensor, "read", read)

        def counted(stored, *args):
            self.read += 1
            return read(stored, *args)

        StoredTensor.read = counted

    def converted(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """What conversions do: rows in parts, swapped, joined."""
        first, second = tensors["a"].split([3, 4], dim=0)
        lower, upper = tensors["b"].chunk(2, dim=0)
        return torch.cat([upper, second[1:], lower.clone(), first.detach()])

    @parameterized.expand([(0, ((0, 4), (9, 2))), (0, ((0, 0), (11, 0))), (1, ((0, 1), (2, 2)))])
    def test_reads_what_is_asked_for(self, dim, runs):
        expected, stored = self.converted(self.tensors), self.converted(self.stored)
        assert isinstance(stored, StoredTensor) and stored.shape == expected.shape and self.read == 0
        into = torch.empty([sum(n for _, n in runs) if d == dim else n for d, n in enumerate(stored.shape)]).double()
        stored.read(into, dim, runs)
        parts = [expected.narrow(dim, start, length) for start, length in runs]
        assert torch.equal(into, torch.cat(parts, dim).double())

    def test_anything_else_reads_it_all(self):
        whole = self.converted(self.stored) * 2 + self.stored["scalar"]
        assert not isinstance(whole, StoredTensor) and self.read == 2
        assert torch.equal(whole, self.converted(self.tensors) * 2 + 3)
        assert torch.equal(
            torch.cat([self.stored["a"], self.tensors["b"]]), torch.cat(list(self.tensors.values())[:2])
        )
        assert torch.equal(self.stored["a"][:, 1:3], self.tensors["a"][:, 1:3])
