"""diffusers' group offloading of parallel models, in either order of the calls.

Without a second device, offloading to disk shows what is brought back when: what is away has no values.
"""

import copy
import itertools
import tempfile
import unittest

import diffusers
import pytest
import torch
from diffusers.hooks import group_offloading
from packaging.version import Version
from parameterized import parameterized

from diffusers_rocm import ParallelConfig

from ..models.testing_utils.common import BaseModelTesterConfig
from ..models.testing_utils.parallelism import FLOAT32_BAR
from ..models.transformers.test_models_transformer_flux import FluxTransformerTesterConfig
from ..models.transformers.test_models_transformer_hunyuan_video import HunyuanVideoTransformerTesterConfig
from ..models.transformers.test_models_transformer_sd3 import SD3TransformerTesterConfig
from ..models.transformers.test_models_transformer_wan import WanTransformerTesterConfig
from ..testing_utils import message_of, relative_l2, require_torch_multi_accelerator, run_ranks


CONFIGS = {
    "flux": FluxTransformerTesterConfig,
    "wan": WanTransformerTesterConfig,
    "sd3": SD3TransformerTesterConfig,
    "hunyuan_video": HunyuanVideoTransformerTesterConfig,
}
LEVELS = ("block_level", "leaf_level")


def offload(model: torch.nn.Module, level: str, folder: str | None) -> None:
    cpu = torch.device("cpu")
    blocks = {"num_blocks_per_group": 1} if level == "block_level" else {}
    model.enable_group_offload(cpu, cpu, offload_type=level, offload_to_disk_path=folder, **blocks)


def strangers(model: torch.nn.Module) -> int:
    """Parameters that some group of the model holds and the model does not."""
    own, held = {id(x) for x in itertools.chain(model.parameters(), model.buffers())}, []
    for module in model.modules():
        hook = (
            vars(module)["_diffusers_hook"].get_hook("group_offloading") if "_diffusers_hook" in vars(module) else None
        )
        if hook is not None:
            held += [*hook.group.parameters, *hook.group.buffers]
            held += [x for each in hook.group.modules for x in each.parameters()]
    assert held
    return sum(id(x) not in own for x in held)


@torch.no_grad()
def offloaded_after_worker(config: BaseModelTesterConfig, degrees: dict[str, int], level: str, folder: str) -> dict:
    inputs, model = config.get_inputs(2), config.get_model()
    wanted = config.get_output(model, inputs)
    model.enable_parallelism(config=ParallelConfig(**degrees))
    offload(model, level, folder)
    errors, messages = [relative_l2(config.get_output(model, inputs), wanted) for _ in range(2)], {}
    left = strangers(model)
    if "tp" in degrees:
        messages["whole"] = message_of(model.disable_parallelism)
        messages["saved"] = message_of(model.save_pretrained, folder)
    else:
        model.disable_parallelism()
        errors.append(relative_l2(config.get_output(model, inputs), wanted))
    return {"errors": errors, "strangers": left, "messages": messages}


@torch.no_grad()
def offloaded_before_worker(config: BaseModelTesterConfig, degrees: dict[str, int], level: str) -> dict:
    inputs, model = config.get_inputs(2), config.get_model()
    wanted = config.get_output(model, inputs)
    offload(model, level, None)
    model.enable_parallelism(config=ParallelConfig(**degrees))
    error, left = relative_l2(config.get_output(model, inputs), wanted), strangers(model)
    model.disable_parallelism()
    on_disk = config.get_model()
    with tempfile.TemporaryDirectory() as folder:
        offload(on_disk, level, folder)
        message = message_of(on_disk.enable_parallelism, config=ParallelConfig(**degrees))
    return {
        "errors": [error, relative_l2(config.get_output(model, inputs), wanted)],
        "strangers": left + strangers(model),
        "message": message,
    }


@unittest.skipIf(
    Version(diffusers.__version__) < Version("0.42") and not torch.accelerator.is_available(),
    "diffusers before 0.42 offloads nothing without an accelerator",
)
class TestGroupOffload(unittest.TestCase):
    @parameterized.expand(itertools.product(CONFIGS, LEVELS, ({"tp": 2}, {"ulysses": 2})))
    def test_after_enabling(self, name, level, degrees):
        with tempfile.TemporaryDirectory() as folder:  # of all ranks
            results = run_ranks(2, offloaded_after_worker, CONFIGS[name](), degrees, level, folder)
        for result in results:
            assert max(result["errors"]) <= FLOAT32_BAR and result["strangers"] == 0, result
            assert all("are offloaded to disk" in message for message in result["messages"].values()), result

    @parameterized.expand(itertools.product(("flux", "wan"), LEVELS, ({"tp": 2}, {"ulysses": 2})))
    def test_before_enabling(self, name, level, degrees):
        for result in run_ranks(2, offloaded_before_worker, CONFIGS[name](), degrees, level):
            assert max(result["errors"]) <= FLOAT32_BAR and result["strangers"] == 0, result
            assert "enable parallelism first, then offloading" in result["message"], result


class TestKeptOnTheHost(unittest.TestCase):
    @unittest.skipUnless(hasattr(group_offloading.ModuleGroup, "_to_cpu"), "diffusers before 0.42 has no such thing")
    def test_quantized(self):
        """What a group keeps must not go to the device with the parameter."""
        torchao = pytest.importorskip("torchao.quantization")
        layer = torch.nn.Linear(32, 32)
        torchao.quantize_(layer, torchao.Int8WeightOnlyConfig(version=2))
        kept = group_offloading.ModuleGroup._to_cpu(layer.weight, True)
        torch.utils.swap_tensors(layer.weight, copy.deepcopy(layer.weight).to("meta"))
        assert kept.qdata.device.type == "cpu" and layer.weight.qdata.device.type == "meta"


@torch.no_grad()
def accelerator_worker(level: str, options: dict, degrees: dict[str, int], before: bool, quantized: bool) -> dict:
    """Weights on the host; what the device held at most, against all of the model."""
    config, device = WideFluxTesterConfig(), torch.device("cuda", torch.distributed.get_rank())
    inputs = {name: x.to(device) for name, x in config.get_inputs(1).items()}
    model = config.get_model()
    if quantized:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig(version=2))
    wanted = config.get_output(copy.deepcopy(model).to(device), inputs)
    blocks = {"num_blocks_per_group": 1} if level == "block_level" else {}
    steps = [
        lambda: model.enable_parallelism(config=ParallelConfig(**degrees)),
        lambda: model.enable_group_offload(device, torch.device("cpu"), offload_type=level, **blocks, **options),
    ]
    for step in reversed(steps) if before else steps:
        step()
    config.get_output(model, inputs)  # with streams, the first forward finds the order of the groups
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    errors = [relative_l2(config.get_output(model, inputs), wanted) for _ in range(2)]
    whole = sum(x.numel() for x in config.get_model().parameters()) * (1 if quantized else 4)
    return {"errors": errors, "peak": (torch.cuda.max_memory_allocated() - held) / whole}


class WideFluxTesterConfig(FluxTransformerTesterConfig):
    """Weights that count beside the activations."""

    def get_init_dict(self):
        wide = {"attention_head_dim": 128, "axes_dims_rope": (16, 56, 56), "num_layers": 4, "num_single_layers": 8}
        return {**super().get_init_dict(), **wide}


@require_torch_multi_accelerator
class TestGroupOffloadAccelerator(unittest.TestCase):
    OPTIONS = ({}, {"use_stream": True}, {"use_stream": True, "low_cpu_mem_usage": True, "record_stream": True})

    @parameterized.expand(itertools.product(LEVELS, OPTIONS, ({"tp": 2}, {"ulysses": 2}), (False, True)))
    def test_parity_and_peak(self, level, options, degrees, before):
        for result in run_ranks(2, accelerator_worker, level, options, degrees, before, False, device="cuda"):
            assert max(result["errors"]) <= FLOAT32_BAR and result["peak"] < 0.35, result

    @parameterized.expand(itertools.product(LEVELS, OPTIONS, ({"tp": 2}, {"ulysses": 2}), (False, True)))
    def test_quantized(self, level, options, degrees, before):
        pytest.importorskip("torchao")
        for result in run_ranks(2, accelerator_worker, level, options, degrees, before, True, device="cuda"):
            assert max(result["errors"]) <= FLOAT32_BAR and result["peak"] < 0.5, result
