"""torchao's quantisation of parallel models: of whole weights that are cut, of shards, and of what is being loaded."""

import copy
import itertools
import math
import tempfile
import unittest

import pytest
import torch
from parameterized import parameterized
from torch import nn

import diffusers_rocm
from diffusers_rocm import ParallelConfig, TensorParallelConfig
from diffusers_rocm.distributed.quantized import is_quantized, parts, shard_of_part, take
from diffusers_rocm.distributed.sharding import Block, Shard

from ..models.testing_utils.common import BaseModelTesterConfig, randn
from ..models.testing_utils.parallelism import FLOAT32_BAR
from ..models.transformers.test_models_transformer_flux import FluxTransformerTesterConfig
from ..models.transformers.test_models_transformer_sd3 import SD3TransformerTesterConfig
from ..models.transformers.test_models_transformer_wan import WanTransformerTesterConfig
from ..testing_utils import message_of, relative_l2, require_torch_multi_accelerator, run_ranks


torchao = pytest.importorskip("torchao", minversion="0.16.0")

from torchao.quantization import (  # noqa: E402
    Float8WeightOnlyConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    quantize_,
)

from ..models.testing_utils.features import DYNAMIC, KINDS, MESHES, quantize  # noqa: E402


# How much further from float32 a parallel model may be than the quantised model of one process.
QUALITY_BAR = 1.1

CONFIGS = {
    "flux": FluxTransformerTesterConfig,
    "wan": WanTransformerTesterConfig,
    "sd3": SD3TransformerTesterConfig,
}
DEGREES = tuple(MESHES.values())
CASES = [(name, kind, {"tp": 2}) for name in CONFIGS for kind in KINDS if (name, kind) != ("wan", "int4 by groups")]
CASES += [("flux", kind, degrees) for kind in KINDS for degrees in DEGREES[1:]]


def same_parts(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = parts(a), parts(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def held(model: nn.Module) -> int:
    """Bytes of the weights, as they are held."""
    return sum(part.nbytes for x in model.parameters() for part in parts(x).values())


def errors(exact: torch.Tensor, reference: torch.Tensor, output: torch.Tensor) -> dict[str, float]:
    """Of the parallel model from float32, of the quantised one of one process from that, and between the two."""
    pairs = {"error": (output, exact), "own": (reference, exact), "distance": (output, reference)}
    return {name: relative_l2(*pair) for name, pair in pairs.items()}


def over_weights(results: list[dict]) -> dict:
    """The root mean square of the errors with several random weights: a single one's roundings add up by chance."""
    rms = {name: sum(each[name] ** 2 for each in results) ** 0.5 for name in ("error", "own", "distance")}
    return results[0] | {name: value / len(results) ** 0.5 for name, value in rms.items()}


@torch.no_grad()
def worker(config: BaseModelTesterConfig, kind: str, degrees: dict[str, int], when: str, differ: bool = False) -> dict:
    seeds = range(4 if when == "after" else 1)
    return over_weights([one(config, kind, degrees, when, differ, seed) for seed in seeds])


def one(config: BaseModelTesterConfig, kind: str, degrees: dict, when: str, differ: bool, seed: int) -> dict:
    inputs, model = config.get_inputs(1), config.get_model(seed)
    exact = config.get_output(model, inputs)
    whole = quantize(copy.deepcopy(model), kind)
    reference = config.get_output(whole, inputs)
    if when == "before":
        model = copy.deepcopy(whole)
    if differ and torch.distributed.get_rank() > 0:
        model = quantize(config.get_model(seed + 1), kind)
    model.enable_parallelism(config=ParallelConfig(**degrees))
    if when == "after":
        quantize(model, kind)
    output = config.get_output(model, inputs)
    result = errors(exact, reference, output) | {
        "quantized": sum(map(is_quantized, model.parameters())),
        "held": held(model) / held(whole),
        "saved": message_of(model.save_pretrained, "nowhere"),
    }
    try:
        model.disable_parallelism()
    except ValueError as error:
        assert torch.equal(config.get_output(model, inputs), output)  # nothing was changed
        return result | {"whole": str(error)}
    now = dict(model.named_parameters())
    same = all(same_parts(x, now[name]) for name, x in whole.named_parameters())
    return result | {"whole": same and torch.equal(config.get_output(model, inputs), reference)}


def check_quality(result: dict) -> None:
    assert result["own"] > 1e-3, result  # or nothing was quantised
    assert result["error"] <= QUALITY_BAR * result["own"], result
    assert result["distance"] <= QUALITY_BAR * result["own"], result


class TestQuantization(unittest.TestCase):
    @parameterized.expand(CASES)
    def test_before_enabling(self, name, kind, degrees):
        """Cut, the weights are the very ones of one process."""
        for result in run_ranks(math.prod(degrees.values()), worker, CONFIGS[name](), kind, degrees, "before"):
            check_quality(result)
            if kind not in DYNAMIC:
                assert result["distance"] <= FLOAT32_BAR, result
            assert result["whole"] is True, result
            assert result["quantized"] > 10 and "is not saved while it is parallel" in result["saved"], result
            if "tp" in degrees:
                assert result["held"] < 0.8, result  # the tiny models' norms and embeddings weigh much

    @parameterized.expand(CASES)
    def test_after_enabling(self, name, kind, degrees):
        """Shards that are quantised have scales of their own, where rows are cut: no further off."""
        for result in run_ranks(math.prod(degrees.values()), worker, CONFIGS[name](), kind, degrees, "after"):
            check_quality(result)
            if "tp" not in degrees or kind == "int4 by groups":  # groups are the same, cut or not
                assert result["whole"] is True, result
            else:
                assert "quantised and cannot be made whole" in result["whole"], result

    @parameterized.expand([({"tp": 2},), ({"ulysses": 2},)])
    def test_weights_of_the_first_rank(self, degrees):
        for result in run_ranks(2, worker, CONFIGS["flux"](), "int8", degrees, "before", True):
            assert result["distance"] <= FLOAT32_BAR and result["whole"] is True, result

    def test_groups_that_ranks_would_cut(self):
        """Wan's feed-forward is dealt in fours here, and eights have a scale in common."""
        for message in run_ranks(2, cut_groups_worker, CONFIGS["wan"]()):
            assert "ffn.net.2 cannot be cut for tp=2: 8 elements have a scale in common, and ranks keep" in message


@torch.no_grad()
def cut_groups_worker(config: BaseModelTesterConfig) -> str:
    model = quantize(config.get_model(), "int4 by groups")
    return message_of(model.enable_parallelism, config=TensorParallelConfig(tp=2))


class OfGroupsFluxTesterConfig(FluxTransformerTesterConfig):
    """Heads of as many elements as have a scale in common."""

    heads = 2

    def get_init_dict(self):
        heads = {"num_attention_heads": self.heads, "attention_head_dim": 32, "axes_dims_rope": (8, 12, 12)}
        return {**super().get_init_dict(), **heads}


class OfUnevenGroupsFluxTesterConfig(OfGroupsFluxTesterConfig):
    heads = 3


def in_groups(model: nn.Module) -> None:
    config = IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerGroup(32))
    quantize_(model, config, lambda module, path: path.endswith("attn.to_out.0"))


@torch.no_grad()
def groups_worker(config: BaseModelTesterConfig, before: bool) -> dict:
    inputs, model = config.get_inputs(1), config.get_model()
    whole = config.get_model()
    in_groups(whole)
    reference = config.get_output(whole, inputs)
    if before:
        in_groups(model)
    model.enable_parallelism(config=TensorParallelConfig(tp=2))
    if not before:
        in_groups(model)
    error = relative_l2(config.get_output(model, inputs), reference)
    try:
        model.disable_parallelism()
    except ValueError as caught:
        return {"error": error, "whole": str(caught)}
    now = dict(model.named_parameters())
    return {"error": error, "whole": all(same_parts(x, now[name]) for name, x in whole.named_parameters())}


@torch.no_grad()
def unlike_worker() -> dict[str, str]:
    """Quantised on one rank, or otherwise on each."""
    config, first, messages = CONFIGS["flux"](), torch.distributed.get_rank() == 0, {}
    kinds = {
        "one rank": (Int8WeightOnlyConfig(version=2), None),
        "others": (Int8WeightOnlyConfig(version=2), Float8WeightOnlyConfig()),
        "activations": (KINDS["int8"], KINDS["int8 dynamic"]),
    }
    for name, pair in kinds.items():
        kind = pair[0 if first else 1]
        model = config.get_model()
        if kind is not None:
            quantize_(model, kind)
        messages[name] = message_of(model.enable_parallelism, config=TensorParallelConfig(tp=2))
        model = config.get_model()
        model.enable_parallelism(config=TensorParallelConfig(tp=2))
        if kind is not None:
            quantize_(model, kind)
        messages[f"{name}, later"] = message_of(model.disable_parallelism)
    return messages


@torch.no_grad()
def scales_worker() -> float:
    """The same integers on all ranks, and other scales: all ranks take those of the first."""
    config = CONFIGS["flux"]()
    model, whole, inputs = (
        quantize(config.get_model(), "int8"),
        quantize(config.get_model(), "int8"),
        config.get_inputs(1),
    )
    if torch.distributed.get_rank() == 1:
        model.transformer_blocks[0].attn.to_q.weight.scale.mul_(1.5)
    model.enable_parallelism(config=ParallelConfig(ulysses=2))
    return relative_l2(config.get_output(model, inputs), config.get_output(whole, inputs))


@torch.no_grad()
def adapters_worker() -> dict:
    """Adapters that were quantised with the shards: neither saved nor joined by others, and as good as before."""
    config = CONFIGS["flux"]()
    inputs, model = config.get_inputs(1), config.get_model()
    state = {
        "transformer_blocks.0.attn.to_out.0.lora_A.weight": randn(4, 128, seed=1) / 12,
        "transformer_blocks.0.attn.to_out.0.lora_B.weight": randn(128, 4, seed=2) / 4,
    }
    model.load_lora_adapter(state, prefix=None, adapter_name="one")
    model.enable_parallelism(config=TensorParallelConfig(tp=2))
    quantize_(model, KINDS["int8"])
    before = config.get_output(model, inputs)
    with tempfile.TemporaryDirectory() as folder:
        messages = {
            "save": message_of(model.save_lora_adapter, folder, "one"),
            "load": message_of(model.load_lora_adapter, state, prefix=None, adapter_name="two"),
            "fuse": message_of(model.fuse_lora),
        }
    return messages | {"same": torch.equal(config.get_output(model, inputs), before)}


class TestQuantizedUses(unittest.TestCase):
    @parameterized.expand(itertools.product((OfGroupsFluxTesterConfig, OfUnevenGroupsFluxTesterConfig), (True, False)))
    def test_groups_of_a_head(self, config, before):
        for result in run_ranks(2, groups_worker, config(), before):
            assert result["error"] <= FLOAT32_BAR, result
            if config is OfGroupsFluxTesterConfig and not before:  # a group is all that a rank has of a row
                assert "quantised and cannot be made whole" in result["whole"], result
            else:
                assert result["whole"] is True, result

    def test_ranks_that_quantize_otherwise(self):
        for messages in run_ranks(2, unlike_worker):
            for name, message in messages.items():
                what = "kinds of weights" if "later" in name else "models"
                assert f"the ranks were given different {what}" in message, (name, message)
                assert "on rank 0 and" in message and "weight" in message, (name, message)

    def test_scales_of_the_first_rank(self):
        for error in run_ranks(2, scales_worker):
            assert error <= FLOAT32_BAR, error

    def test_adapters_that_were_quantized(self):
        for result in run_ranks(2, adapters_worker):
            assert "lora_A.one.weight were quantised and cannot be made whole" in result["save"], result
            assert "lora_A.one.weight were quantised and cannot be made whole" in result["load"], result
            assert "which fusing would round again" in result["fuse"] and result["same"], result


class TestQuantizedParts(unittest.TestCase):
    @parameterized.expand(KINDS)
    def test_cut(self, kind):
        torch.manual_seed(0)
        weight = quantize(nn.Sequential(nn.Linear(96, 160)), kind)[0].weight
        for dim, unit in ((0, 16), (1, 16)):
            blocks = (Block(weight.shape[dim] - 32, unit), Block(32, unit))
            shard = Shard(dim, blocks)
            for rank in range(2):
                local = take(shard, weight, rank, 2)
                assert type(local) is type(weight) and all(x.is_contiguous() for x in parts(local).values())
                assert torch.equal(local.dequantize(), shard.take(weight.dequantize(), rank, 2))

    def test_groups_are_not_cut(self):
        whole, shape = (160, 6), (160, 96)  # groups of 16
        assert shard_of_part(Shard(1, (Block(96, 32),)), whole, shape) == Shard(1, (Block(6, 2),))
        message = message_of(shard_of_part, Shard(1, (Block(96, 8),)), whole, shape)
        assert "16 elements have a scale in common, and ranks keep multiples of 8" in message

    def test_other_kinds_are_refused(self):
        class PackedTensor(torch.Tensor):
            pass

        model = CONFIGS["flux"]().get_model()
        linear = model.transformer_blocks[0].attn.to_q
        packed = linear.weight.detach().as_subclass(PackedTensor)
        linear.weight = nn.Parameter(packed, requires_grad=False)
        message = message_of(diffusers_rocm.verify_plan, model, 2)
        assert "transformer_blocks.0.attn.to_q is a PackedTensor and cannot be cut" in message, message


class LargeFluxTesterConfig(FluxTransformerTesterConfig):
    """Wide enough for the kernels that quantised products have on a GPU."""

    device = "cuda"  # ROCm's name too

    def get_init_dict(self):
        return {**super().get_init_dict(), "attention_head_dim": 64, "axes_dims_rope": (16, 24, 24)}


def on_a_gpu(kind: str):
    """The configs that have kernels for GPUs alone, too."""
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, Int4WeightOnlyConfig

    if kind == "fp8 dynamic":
        return Float8DynamicActivationFloat8WeightConfig()
    if kind == "int4":
        return Int4WeightOnlyConfig(group_size=32, int4_packing_format="tile_packed_to_4d")
    return KINDS[kind]


@torch.no_grad()
def accelerator_worker(kind: str, degrees: dict[str, int], when: str) -> dict:
    config, results = LargeFluxTesterConfig(), []

    def quantized(model: nn.Module) -> nn.Module:
        blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
        for block in blocks:
            quantize_(block, on_a_gpu(kind), lambda m, _: isinstance(m, nn.Linear))
        return model

    for seed in range(4):
        inputs, plain = config.get_inputs(1), config.get_model(seed)
        exact = config.get_output(plain, inputs)
        inputs, plain = config.cast(inputs, torch.bfloat16), plain.bfloat16()
        whole = quantized(copy.deepcopy(plain))
        model = copy.deepcopy(whole if when == "before" else plain)
        model.enable_parallelism(config=ParallelConfig(**degrees))
        if when == "after":
            quantized(model)
        results.append(errors(exact, config.get_output(whole, inputs), config.get_output(model, inputs)))
    return over_weights(results)


@require_torch_multi_accelerator
class TestQuantizationAccelerator(unittest.TestCase):
    @parameterized.expand(itertools.product((*KINDS, "fp8 dynamic", "int4"), DEGREES[:2], ("before", "after")))
    def test_parity(self, kind, degrees, when):
        def run():
            return run_ranks(2, accelerator_worker, kind, degrees, when, device="cuda")

        if kind == "int4" and when == "before" and "tp" in degrees:
            with self.assertRaisesRegex(AssertionError, "Int4TilePackedTo4dTensor and cannot be cut"):
                run()
            return
        for result in run():
            assert result["error"] <= QUALITY_BAR * result["own"], result
