"""LoRA adapters of parallel models: whatever is done to them, each forward is that of one process."""

import math
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from parameterized import parameterized
from torch import nn

from diffusers_rocm import ParallelConfig
from diffusers_rocm.hooks.tensor_parallel import sharded_modules

from ..models.testing_utils.common import BaseModelTesterConfig, randn
from ..models.testing_utils.parallelism import FLOAT32_BAR
from ..models.testing_utils.variants import variants
from ..models.transformers.test_models_transformer_flux import FluxTransformerTesterConfig
from ..testing_utils import message_of, relative_l2, run_ranks, slow


pytest.importorskip("peft")

EFFECT = 1e-2  # what leaving an adapter out must change at least


def adapter(config: BaseModelTesterConfig, seed: int, rank: int, bias: bool = False, fused: bool = False) -> dict:
    """A LoRA of every Linear and every Conv2d whose channels mix, about half as large as their weights."""
    with torch.device("meta"):
        model = config.model_class(**config.get_init_dict())
    if fused:
        model.fuse_qkv_projections()
    state = {}
    for path, module in model.named_modules():
        if not isinstance(module, (nn.Linear, nn.Conv2d)) or getattr(module, "groups", 1) > 1:
            continue
        if fused and path.rpartition(".")[2] in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"):
            continue
        outputs, inputs, *kernel = module.weight.shape
        a, b = (rank, inputs, *kernel), (outputs, rank, *(1 for _ in kernel))
        state[f"{path}.lora_A.weight"] = randn(*a, seed=seed) / math.prod(a[1:]) ** 0.5
        state[f"{path}.lora_B.weight"] = randn(*b, seed=seed + 1) * 0.5 / rank**0.5
        if bias and module.bias is not None:
            state[f"{path}.lora_B.bias"] = randn(outputs, seed=seed + 2) * 0.3
        seed += 3
    return state


def load(model: nn.Module, config: BaseModelTesterConfig, name: str, seed: int, rank: int, **kwargs) -> None:
    made = {key: kwargs.pop(key) for key in ("bias", "fused") if key in kwargs}
    state = adapter(config, seed, rank, **made)
    model.load_lora_adapter(state, prefix=None, adapter_name=name, **kwargs)


def add(model: nn.Module, config: BaseModelTesterConfig) -> None:
    from peft import LoraConfig

    rs = LoraConfig(r=4, lora_alpha=3, use_rslora=True, target_modules="all-linear", init_lora_weights=False)
    rs.target_modules = sorted({path.rpartition(".lora_A")[0] for path in adapter(config, 0, 1) if "lora_A" in path})
    torch.manual_seed(5)  # the reference and the first rank
    if getattr(model, "parallelism", None) is not None:
        torch.manual_seed(5 + torch.distributed.get_rank())
    model.add_adapter(rs, "rs")


OPERATIONS: dict[str, Callable[[nn.Module, BaseModelTesterConfig], None]] = {
    "load one": lambda model, config: load(model, config, "one", 1, 3),
    "load two": lambda model, config: load(model, config, "two", 1000, 5, low_cpu_mem_usage=True),
    "load biased": lambda model, config: load(model, config, "biased", 2000, 2, bias=True),
    "load fused": lambda model, config: load(model, config, "one", 1, 3, fused=True),
    "add": add,
    "set": lambda model, config: model.set_adapters(["one", "two"], [0.7, -1.3]),
    "fuse": lambda model, config: model.fuse_lora(lora_scale=0.8),
    "fuse two": lambda model, config: model.fuse_lora(safe_fusing=True, adapter_names=["two"]),
    "unfuse": lambda model, config: model.unfuse_lora(),
    "disable": lambda model, config: model.disable_lora(),
    "enable": lambda model, config: model.enable_lora(),
    "delete two": lambda model, config: model.delete_adapters("two"),
    "prepare": lambda model, config: model.enable_lora_hotswap(target_rank=6),
    "swap": lambda model, config: load(model, config, "one", 3000, 3, hotswap=True),
    "swap larger": lambda model, config: load(model, config, "one", 4000, 6, hotswap=True),
    "swap smaller": lambda model, config: load(model, config, "one", 5000, 2, hotswap=True),
    "unload": lambda model, config: model.unload_lora(),
    "fuse qkv": lambda model, config: model.fuse_qkv_projections(),
}
# Of which the output is that of before.
WITHOUT_EFFECT = ("fuse two", "unfuse", "prepare", "fuse qkv")

ALL = ("load one", "load two", "set", "fuse", "unfuse", "disable", "enable", "delete two", "swap", "unload")


@torch.no_grad()
def scenario_worker(
    config: BaseModelTesterConfig, degrees: dict[str, int], operations: tuple[str, ...], enabled_at: int
) -> dict:
    """Every operation on a whole model and on a parallel one, and what either answers then."""
    torch.manual_seed(0)
    reference, model, inputs = config.get_model(), config.get_model(), config.get_inputs(1)
    answer, errors, effects, shards = config.get_output(reference, inputs), {}, {}, {}
    for index, operation in enumerate((*operations, None)):
        if index == enabled_at:
            model.enable_parallelism(config=ParallelConfig(**degrees))
        if operation is not None:
            for each in (reference, model):
                OPERATIONS[operation](each, config)
        before, answer = answer, config.get_output(reference, inputs)
        key = f"{index} {operation}"
        errors[key], effects[key] = relative_l2(config.get_output(model, inputs), answer), relative_l2(answer, before)
        shards[key] = sum(".lora_" in path and hasattr(m, "sharding") for path, m in model.named_modules())
    model.disable_parallelism()
    errors["disabled"] = relative_l2(config.get_output(model, inputs), answer)
    now, wanted = model.state_dict(), reference.state_dict()
    assert now.keys() == wanted.keys()
    errors["state"] = max(relative_l2(now[name], wanted[name]) for name in now if wanted[name].norm() > 0)
    assert next(sharded_modules(model), None) is None
    assert not any("modulation_order" in name for name, _ in model.named_buffers())
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return {"errors": errors, "effects": effects, "shards": shards, "hooks": hooks}


def check(
    config: BaseModelTesterConfig, degrees: dict[str, int], operations: tuple[str, ...] = ALL, enabled_at: int = 0
) -> list[dict]:
    results = run_ranks(math.prod(degrees.values()), scenario_worker, config, degrees, operations, enabled_at)
    for result in results:
        assert max(result["errors"].values()) <= FLOAT32_BAR, result["errors"]
        assert result["hooks"] == 0, result
        for key, effect in result["effects"].items():
            name = key.partition(" ")[2]
            if name != "None" and name not in WITHOUT_EFFECT:
                assert effect > EFFECT, f"{name} changes nothing: {effect}"
        if "tp" in degrees:
            assert all(count > 0 for key, count in result["shards"].items() if "load one" in key and enabled_at == 0)
    print(degrees, operations, enabled_at, max(max(result["errors"].values()) for result in results))
    return results


FLUX = FluxTransformerTesterConfig()
MESHES = {
    "TP 2": {"tp": 2},
    "TP 3": {"tp": 3},
    "Ulysses 2": {"ulysses": 2},
    "TP 2 x Ulysses 2": {"ulysses": 2, "tp": 2},
}


class TestLora(unittest.TestCase):
    @parameterized.expand([("TP 2", 0), ("TP 2", 4), ("Ulysses 2", 0), ("Ulysses 2", 2)])
    def test_all_there_is_to_do(self, mesh, enabled_at):
        check(FLUX, MESHES[mesh], enabled_at=enabled_at)
