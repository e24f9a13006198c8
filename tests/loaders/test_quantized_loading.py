"""torchao's quantisation while a parallel model is read, and checkpoints of what is quantised."""

import functools
import importlib.util
import math
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import diffusers
import torch
from diffusers import BitsAndBytesConfig, GGUFQuantizationConfig, QuantoConfig, TorchAoConfig
from packaging.version import Version
from parameterized import parameterized
from torchao.quantization import Int4WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup

from diffusers_rocm import ParallelConfig, TensorParallelConfig
from diffusers_rocm.distributed.quantized import is_quantized
from diffusers_rocm.registration import DTYPE_ARGUMENT

from ..models.testing_utils.common import BaseModelTesterConfig
from ..models.testing_utils.parallelism import FLOAT32_BAR
from ..models.transformers.test_models_transformer_flux import FluxTransformerTesterConfig
from ..testing_utils import message_of, relative_l2, run_ranks, slow
from .test_load import flux_as_published
from .test_quantization import CONFIGS, KINDS, check_quality, errors, held, over_weights
from .testing_utils import elements_read


OTHERS = {
    "quanto": (QuantoConfig, {"weights_dtype": "int8"}, "quanto.QuantoQuantizer"),
    "bitsandbytes": (BitsAndBytesConfig, {"load_in_8bit": True}, "bitsandbytes.BnB8BitDiffusersQuantizer"),
}

needs_to_save_quantized = unittest.skipIf(
    Version(diffusers.__version__) < Version("0.42"), "older diffusers write no safetensors of torchao's tensors"
)


@torch.no_grad()
def load_worker(config: BaseModelTesterConfig, kind: str, folders: list[str], degrees: dict[str, int]) -> dict:
    return over_weights([_load(config, kind, folder, degrees) for folder in folders])


def _load(config: BaseModelTesterConfig, kind: str, folder: str, degrees: dict[str, int]) -> dict:
    inputs, dtype = config.get_inputs(1), {DTYPE_ARGUMENT: torch.float32}
    model = config.model_class.from_pretrained(folder, **dtype)
    exact = config.get_output(model, inputs)
    quantization = TorchAoConfig(KINDS[kind], modules_to_not_convert=["proj_out", "x_embedder"])
    whole = config.model_class.from_pretrained(folder, quantization_config=quantization, **dtype)
    reference = config.get_output(whole, inputs)
    with elements_read() as read:
        loaded = config.model_class.from_pretrained(
            folder, parallel_config=ParallelConfig(**degrees), quantization_config=quantization, **dtype
        )
    return errors(exact, reference, config.get_output(loaded, inputs)) | {
        "quantized": [sum(map(is_quantized, each.parameters())) for each in (loaded, whole)],
        "held": held(loaded) / held(whole),
        "read": sum(read) / sum(x.numel() for x in model.parameters()),
    }


@torch.no_grad()
def quantized_checkpoint_worker(config: BaseModelTesterConfig, folder: str) -> float:
    inputs = config.get_inputs(1)
    dtype = {DTYPE_ARGUMENT: torch.float32}
    reference = config.get_output(config.model_class.from_pretrained(folder, **dtype), inputs)
    loaded = config.model_class.from_pretrained(folder, parallel_config=TensorParallelConfig(tp=2), **dtype)
    assert sum(map(is_quantized, loaded.parameters())) > 10
    return relative_l2(config.get_output(loaded, inputs), reference)


@torch.no_grad()
def other_method_worker(config: BaseModelTesterConfig, folder: str, method: str) -> str:
    """Their packages need not be here."""
    cls, arguments, path = OTHERS[method]
    with (
        mock.patch(f"diffusers.quantizers.{path}.validate_environment"),
        mock.patch(f"diffusers.quantizers.{path}._process_model_before_weight_loading"),
        mock.patch(f"diffusers.quantizers.{path}.update_device_map", new=lambda self, device_map: device_map),
    ):
        return message_of(
            config.model_class.from_pretrained,
            folder,
            parallel_config=TensorParallelConfig(tp=2),
            quantization_config=cls(**arguments),
        )


def gguf_worker(config: BaseModelTesterConfig, folder: str) -> str:
    return message_of(
        config.model_class.from_single_file,
        f"{folder}/model.gguf",
        config=folder,
        parallel_config=TensorParallelConfig(tp=2),
        quantization_config=GGUFQuantizationConfig(),
    )


@torch.no_grad()
def split_gguf_worker(folder: str) -> dict:
    """Sequences are split, and weights are not: enabled later, or when it is loaded."""
    config = BlocksOfRealWidth()
    inputs, plain = config.get_inputs(1), config.model_class.from_pretrained(folder)
    quantization, errors = GGUFQuantizationConfig(compute_dtype=torch.float32), {}
    load = functools.partial(
        config.model_class.from_single_file,
        f"{folder}/model.gguf",
        config=folder,
        quantization_config=quantization,
        **{DTYPE_ARGUMENT: torch.float32},
    )
    model = load()
    wanted = config.get_output(model, inputs)
    errors["own"] = relative_l2(wanted, config.get_output(plain, inputs))
    errors["tp"] = message_of(model.enable_parallelism, config=TensorParallelConfig(tp=2))
    model.enable_parallelism(config=ParallelConfig(ulysses=2))
    errors["enabled"] = relative_l2(config.get_output(model, inputs), wanted)
    model = load(parallel_config=ParallelConfig(ulysses=2))
    errors["loaded"] = relative_l2(config.get_output(model, inputs), wanted)
    return errors


@torch.no_grad()
def save_worker(folder: str) -> float:
    """diffusers' own quantised model, made parallel, made whole, saved and read again."""
    config, dtype = CONFIGS["flux"](), {DTYPE_ARGUMENT: torch.float32}
    quantized = TorchAoConfig(KINDS["int8"])
    model = config.model_class.from_pretrained(f"{folder}/plain", quantization_config=quantized, **dtype)
    wanted = config.get_output(model, config.get_inputs(1))
    model.enable_parallelism(config=TensorParallelConfig(tp=2))
    model.disable_parallelism()
    own = f"{folder}/{torch.distributed.get_rank()}"
    model.save_pretrained(own)
    again = config.model_class.from_pretrained(own, **dtype)
    return relative_l2(config.get_output(again, config.get_inputs(1)), wanted)


@torch.no_grad()
def groups_worker(config: BaseModelTesterConfig, folder: str) -> dict:
    """Rows of x_embedder hold 16 elements, which are no group of 128 in one process either."""
    others = [name for name, _ in config.get_model().named_children() if name != "x_embedder"]
    int4 = Int4WeightOnlyConfig(group_size=128, int4_packing_format="tile_packed_to_4d")
    load = functools.partial(config.model_class.from_pretrained, folder, parallel_config=TensorParallelConfig(tp=2))
    loaded = load(quantization_config=TorchAoConfig(int4, modules_to_not_convert=others))
    by_groups = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(128))
    return {
        "plain": type(loaded.x_embedder.weight.data) is torch.Tensor,
        "asserted": message_of(load, quantization_config=TorchAoConfig(by_groups, modules_to_not_convert=others)),
        "one file": message_of(
            config.model_class.from_single_file,
            f"{folder}/diffusion_pytorch_model.safetensors",
            parallel_config=TensorParallelConfig(tp=2),
            quantization_config=TorchAoConfig(int4),
        ),
    }


def cut_off_worker(config: BaseModelTesterConfig, folder: str) -> str:
    return message_of(
        config.model_class.from_pretrained,
        folder,
        parallel_config=TensorParallelConfig(tp=2),
        quantization_config=TorchAoConfig(KINDS["int8"]),
    )


class BlocksOfRealWidth(FluxTransformerTesterConfig):
    """By whose width diffusers converts the checkpoints of FLUX.1's authors; one block of each kind."""

    def get_init_dict(self):
        return {
            "num_layers": 1,
            "num_single_layers": 1,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 24,
            "in_channels": 16,
            "guidance_embeds": True,
        }


def write_gguf(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Weights of blocks in 8 bits, 32 of them with a scale in common."""
    import gguf

    kind, writer = gguf.GGMLQuantizationType.Q8_0, gguf.GGUFWriter(file, "flux")
    for name, tensor in tensors.items():
        array = tensor.float().numpy()
        if tensor.ndim == 2 and "blocks" in name:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class TestQuantizedLoading(unittest.TestCase):
    def test_rows_of_no_whole_group(self):
        with tempfile.TemporaryDirectory() as folder:
            CONFIGS["flux"]().get_model().save_pretrained(folder)
            for result in run_ranks(2, groups_worker, CONFIGS["flux"](), folder):
                assert result["plain"], result
                assert "of x_embedder.weight" in result["asserted"] and "divisible" in result["asserted"], result
                assert "quantises nothing that it reads from a single file" in result["one file"], result

    @parameterized.expand([(kind, degrees) for kind in KINDS for degrees in ({"tp": 2}, {"ulysses": 2, "tp": 2})])
    def test_load(self, kind, degrees):
        """Each slice is quantised as it is read."""
        config = CONFIGS["flux"]()
        with tempfile.TemporaryDirectory() as folder:
            folders = [f"{folder}/{seed}" for seed in range(4)]
            for seed, each in enumerate(folders):
                config.get_model(seed).save_pretrained(each)
            for result in run_ranks(math.prod(degrees.values()), load_worker, config, kind, folders, degrees):
                check_quality(result)
                assert result["quantized"][0] == result["quantized"][1] > 10, result
                assert result["held"] < 0.6 and result["read"] < 0.6, result

    @needs_to_save_quantized
    def test_load_what_was_quantized(self):
        """diffusers reads it, and it is cut."""
        config = CONFIGS["flux"]()
        with tempfile.TemporaryDirectory() as folder:
            config.get_model().save_pretrained(f"{folder}/plain")
            quantization = TorchAoConfig(KINDS["int8"])
            model = config.model_class.from_pretrained(f"{folder}/plain", quantization_config=quantization)
            model.save_pretrained(f"{folder}/quantized")
            for error in run_ranks(2, quantized_checkpoint_worker, config, f"{folder}/quantized"):
                assert error <= FLOAT32_BAR, error

    @parameterized.expand(OTHERS)
    def test_other_methods_are_refused(self, method):
        config = CONFIGS["flux"]()
        with tempfile.TemporaryDirectory() as folder:
            config.get_model().save_pretrained(folder)
            for message in run_ranks(2, other_method_worker, config, folder, method):
                assert f"weights of {method} cannot be cut" in message and "TorchAoConfig" in message, message

    def test_gguf_is_refused(self):
        config = CONFIGS["flux"]()
        with tempfile.TemporaryDirectory() as folder:
            config.get_model().save_pretrained(folder)
            Path(folder, "model.gguf").write_bytes(b"GGUF")
            for message in run_ranks(2, gguf_worker, config, folder):
                assert "weights of GGUF cannot be cut" in message and "TorchAoConfig" in message, message

    @slow
    @unittest.skipUnless(importlib.util.find_spec("gguf"), "needs gguf")
    def test_gguf_with_split_sequences(self):
        with tempfile.TemporaryDirectory() as folder:
            model = BlocksOfRealWidth().get_model()
            model.save_pretrained(folder)
            write_gguf(Path(folder, "model.gguf"), flux_as_published(model.state_dict()))
            for result in run_ranks(2, split_gguf_worker, folder):
                assert 1e-4 < result["own"] < 0.1 and "GGUFLinear" in result["tp"], result
                assert max(result["enabled"], result["loaded"]) <= FLOAT32_BAR, result

    @needs_to_save_quantized
    def test_save_what_was_made_whole(self):
        config = CONFIGS["flux"]()
        with tempfile.TemporaryDirectory() as folder:
            config.get_model().save_pretrained(f"{folder}/plain")
            for error in run_ranks(2, save_worker, folder):
                assert error == 0

    def test_a_file_that_is_cut_off(self):
        config = CONFIGS["flux"]()
        with tempfile.TemporaryDirectory() as folder:
            config.get_model().save_pretrained(folder, max_shard_size="500KB")
            file = sorted(Path(folder).glob("*.safetensors"))[1]
            file.write_bytes(file.read_bytes()[:-5000])
            for message in run_ranks(2, cut_off_worker, config, folder):
                assert file.name in message and "ends before the end of" in message, message


if __name__ == "__main__":
    unittest.main()
