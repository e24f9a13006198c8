"""LoRA adapters of parallel models: whatever is done to them, each forward is that of one process."""

import functools
import math
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE
from diffusers.utils import SAFETENSORS_WEIGHTS_NAME
from parameterized import parameterized
from safetensors.torch import load_file, save_file
from torch import nn

from diffusers_rocm import ParallelConfig, parallelize
from diffusers_rocm.hooks.tensor_parallel import sharded_modules
from diffusers_rocm.pipelines.model_folder import EMBEDDED_MODEL

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
    "unload fused": lambda model, config: model.unload_lora(),
    "fuse qkv": lambda model, config: model.fuse_qkv_projections(),
}
# Of which the output is that of before.
WITHOUT_EFFECT = ("fuse two", "unfuse", "unload fused", "prepare", "fuse qkv")

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


class SmallFluxTesterConfig(FluxTransformerTesterConfig):
    """A block of each kind."""

    def get_init_dict(self):
        return {**super().get_init_dict(), "num_layers": 1, "num_single_layers": 1}


FLUX = SmallFluxTesterConfig()
MESHES = {
    "TP 2": {"tp": 2},
    "TP 3": {"tp": 3},
    "Ulysses 2": {"ulysses": 2},
    "TP 2 x Ulysses 2": {"ulysses": 2, "tp": 2},
}
# Embeddings that are Linears, projections packed in one, norms across heads, convolutions, all-gathered inputs.
VARIANTS = (
    "Flux2Transformer",
    "HiDreamImageTransformer",
    "Ideogram4Transformer",
    "QwenImageTransformer",
    "SanaTransformer",
    "SD3Transformer",
    "WanTransformer",
    "ZImageTransformer",
)
BIASED = ("load one", "load biased", "fuse", "unfuse", "disable", "enable", "fuse", "unload fused")


@torch.no_grad()
def agreement_worker(degrees: dict[str, int]) -> tuple[float, float]:
    """`add_adapter` draws at random: the error against a process that draws as the first rank does."""
    reference, model, inputs = FLUX.get_model(), FLUX.get_model(), FLUX.get_inputs(1)
    plain = FLUX.get_output(model, inputs)
    model.enable_parallelism(config=ParallelConfig(**degrees))
    add(reference, FLUX)
    add(model, FLUX)
    answer = FLUX.get_output(reference, inputs)
    return relative_l2(FLUX.get_output(model, inputs), answer), relative_l2(answer, plain)


@torch.no_grad()
def save_worker(degrees: dict[str, int], folder: str) -> dict:
    """What is written of a parallel model is what one process writes, and the model goes on as it was."""
    reference, model, inputs = FLUX.get_model(), FLUX.get_model(), FLUX.get_inputs(1)
    model.enable_parallelism(config=ParallelConfig(**degrees))
    for name in ("load one", "load two", "set"):
        for each in (reference, model):
            OPERATIONS[name](each, FLUX)
    rank, folder = torch.distributed.get_rank(), Path(folder)
    for kind, each in ((f"whole {rank}", reference), ("parallel", model)):
        each.save_lora_adapter(folder / kind, adapter_name="two")
        each.save_pretrained(folder / kind)
    same = {}
    for file in (LORA_WEIGHT_NAME_SAFE, SAFETENSORS_WEIGHTS_NAME):
        wanted, written = (load_file(folder / kind / file) for kind in (f"whole {rank}", "parallel"))
        same[file] = wanted.keys() == written.keys() and all(torch.equal(wanted[k], written[k]) for k in wanted)
    fresh = FLUX.get_model()
    fresh.load_lora_adapter(load_file(folder / "parallel" / LORA_WEIGHT_NAME_SAFE), prefix=None, adapter_name="two")
    reference.set_adapters(["two"])
    errors = relative_l2(FLUX.get_output(fresh, inputs), FLUX.get_output(reference, inputs))
    model.set_adapters(["two"])
    return {
        **same,
        "reloaded": errors,
        "error": relative_l2(FLUX.get_output(model, inputs), FLUX.get_output(reference, inputs)),
        "upcast": message_of(model.save_lora_adapter, folder / "never", "two", True),
    }


def refusals_worker() -> dict[str, str]:
    """What only a whole model can have; after each refusal the model is as it was."""
    from peft import LoHaConfig, LoKrConfig, LoraConfig

    plain = LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False)
    configs = {
        "DoRA": LoraConfig(use_dora=True, target_modules=["to_q"]),
        "PiSSA": LoraConfig(init_lora_weights="pissa", target_modules=["to_q"]),
        "biases": LoraConfig(bias="all", target_modules=["to_q"]),
        "modules": LoraConfig(target_modules=["to_q"], modules_to_save=["proj_out"]),
        "LoKr": LoKrConfig(target_modules=["to_q"]),
        "LoHa": LoHaConfig(target_modules=["to_q"]),
    }
    dora = adapter(FLUX, 1, 3)
    dora |= {key.replace("lora_B", "lora_magnitude_vector"): x.norm(dim=1) for key, x in dora.items() if "_B" in key}
    rank, inputs = torch.distributed.get_rank(), FLUX.get_inputs(1)
    cut = {name: x for name, x in adapter(FLUX, 1, 3).items() if rank == 0 or "to_q" in name}
    short = {name: x[:, :-1] if "to_q.lora_A" in name else x for name, x in adapter(FLUX, 1, 3).items()}
    messages = {}

    @torch.no_grad()
    def refuse(model: nn.Module, action: Callable, *args, **kwargs) -> str:
        """The message, of a model that is left as it was."""
        output, names = FLUX.get_output(model, inputs), [name for name, _ in model.named_parameters()]
        with pytest.raises((ValueError, RuntimeError, OSError)) as caught:
            action(*args, **kwargs)
        assert torch.equal(FLUX.get_output(model, inputs), output), caught.value
        assert [name for name, _ in model.named_parameters()] == names, caught.value
        return str(caught.value)

    config, _ = variants()["SanaTransformer"]
    model, depthwise = config.get_model(), LoraConfig(r=200, target_modules=["conv_depth"])
    model.enable_parallelism(config=ParallelConfig(tp=2))
    messages["depthwise"] = message_of(model.add_adapter, depthwise, "bad")
    assert not hasattr(model, "peft_config") and not any("lora" in name for name, _ in model.named_modules())
    for when in ("first", "second"):
        model = FLUX.get_model()
        model.enable_parallelism(config=ParallelConfig(tp=2))
        if when == "second":
            OPERATIONS["load one"](model, FLUX)
        for name, config in configs.items():
            messages[f"{name}, {when}"] = refuse(model, model.add_adapter, config, "bad")
        load = functools.partial(refuse, model, model.load_lora_adapter, prefix=None, adapter_name="bad")
        messages[f"a file of DoRA, {when}"] = load(dora)
        messages[f"other adapters, {when}"] = load(cut)
        messages[f"size mismatch, {when}"] = load(short)
        messages[f"absent, {when}"] = load("/nowhere" if rank == 1 else adapter(FLUX, 1, 3))
        model.add_adapter(plain, "good")
    for name in ("DoRA", "LoKr"):
        model = FLUX.get_model()
        model.add_adapter(configs[name], "bad")
        messages[f"{name} before"] = message_of(model.enable_parallelism, config=ParallelConfig(tp=2))
        assert next(sharded_modules(model), None) is None
    return messages


@torch.no_grad()
def other_kinds_worker() -> dict[str, float]:
    """Under context parallelism every adapter is whole, and any kind will do."""
    from peft import LoHaConfig, LoraConfig

    errors = {}
    for config in (
        LoraConfig(use_dora=True, target_modules=["to_q", "proj_out"]),
        LoHaConfig(target_modules=["to_q"]),
    ):
        reference, model, inputs = FLUX.get_model(), FLUX.get_model(), FLUX.get_inputs(1)
        model.enable_parallelism(config=ParallelConfig(ulysses=2))
        for each in (reference, model):
            torch.manual_seed(0)
            each.add_adapter(config, "any")
            for name, parameter in sorted(each.named_parameters()):
                if ".lora_B" in name or ".hada_" in name:
                    parameter.normal_(0, 0.5)
        errors[str(config.peft_type)] = relative_l2(FLUX.get_output(model, inputs), FLUX.get_output(reference, inputs))
    return errors


def gradient_worker() -> dict[str, float]:
    """The gradients of A and B, gathered."""
    reference, model, inputs = FLUX.get_model(), FLUX.get_model(), FLUX.get_inputs(1)
    model.enable_parallelism(config=ParallelConfig(tp=2))
    for each in (reference, model):
        each.requires_grad_(False)
        OPERATIONS["load one"](each, FLUX)
        each.set_adapters(["one"])
        output = FLUX.get_output(each, inputs)
        (output * randn(*output.shape, seed=3)).sum().backward()
    whole, errors = dict(reference.named_parameters()), {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False) if ".lora_" in path else ():
            grad, sharding = whole[f"{path}.{name}"].grad, getattr(module, "sharding", None)
            if sharding is not None:
                grad = sharding.shards[name].take(grad, sharding.axis.rank, sharding.axis.size)
            errors[f"{path}.{name}"] = relative_l2(parameter.grad, grad)
    return errors


@torch.no_grad()
def compiled_worker() -> tuple[dict[str, float], list[int]]:
    """Adapters that are swapped under compiled blocks: errors, and graphs after each."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    reference, model, inputs = FLUX.get_model(), FLUX.get_model(), FLUX.get_inputs(1)
    model.enable_parallelism(config=ParallelConfig(tp=2))
    errors, graphs = {}, []
    for name in ("prepare", "load one", "swap", "swap larger", "swap smaller"):
        for each in (reference, model):
            OPERATIONS[name](each, FLUX)
        if name == "load one":
            model.compile_repeated_blocks(fullgraph=True)
        if name != "prepare":
            errors[name] = relative_l2(FLUX.get_output(model, inputs), FLUX.get_output(reference, inputs))
            graphs.append(counters["stats"]["unique_graphs"])
    return errors, graphs


@torch.no_grad()
def pipeline_worker(degrees: dict[str, int], folder: str, before: bool) -> dict:
    """`load_lora_weights` and the rest, of a pipeline: pictures of one process, and of ranks."""
    from diffusers import FluxPipeline

    pipes = [FluxPipeline.from_pretrained(EMBEDDED_MODEL) for _ in range(2)]
    with torch.device("meta"):
        config = FluxTransformerTesterConfig()
        config.get_init_dict = lambda: dict(pipes[0].transformer.config)
    state = {f"transformer.{key}": x * (0.3 if "lora_B" in key else 1) for key, x in adapter(config, 1, 3).items()}
    if torch.distributed.get_rank() == 0:
        save_file(state, Path(folder, LORA_WEIGHT_NAME_SAFE))
    torch.distributed.barrier()
    call = {"height": 64, "width": 64, "num_inference_steps": 2, "max_sequence_length": 16, "output_type": "latent"}

    def draw(pipe, **kwargs) -> torch.Tensor:
        pipe.set_progress_bar_config(disable=True)
        return pipe("a red circle", generator=torch.Generator().manual_seed(0), **call, **kwargs).images

    steps = {
        "load": lambda pipe: pipe.load_lora_weights(folder, adapter_name="one"),
        "set": lambda pipe: pipe.set_adapters(["one"], [0.4]),
        "scale": lambda pipe: None,
        "fuse": lambda pipe: pipe.fuse_lora(lora_scale=0.5),
        "unfuse": lambda pipe: pipe.unfuse_lora(),
        "unload": lambda pipe: pipe.unload_lora_weights(),
    }
    errors, effects, plain = {}, {}, draw(pipes[0])
    if not before:
        parallelize(pipes[1], ParallelConfig(**degrees))
    for name, step in steps.items():
        for pipe in pipes:
            step(pipe)
        if before and name == "load":
            parallelize(pipes[1], ParallelConfig(**degrees))
        kwargs = {"joint_attention_kwargs": {"scale": 0.7}} if name == "scale" else {}
        whole = draw(pipes[0], **kwargs)
        errors[name], effects[name] = relative_l2(draw(pipes[1], **kwargs), whole), relative_l2(whole, plain)
    return {"errors": errors, "effects": effects}


class TestLora(unittest.TestCase):
    @parameterized.expand([("TP 2", 0), ("Ulysses 2", 2)])
    def test_all_there_is_to_do(self, mesh, enabled_at):
        check(FLUX, MESHES[mesh], enabled_at=enabled_at)

    @parameterized.expand([(mesh, at) for mesh in MESHES for at in (0, 2, 4)])
    @slow
    def test_all_there_is_to_do_on_any_mesh(self, mesh, enabled_at):
        check(FLUX, MESHES[mesh], enabled_at=enabled_at)

    @parameterized.expand([(mesh, at) for mesh in MESHES for at in (0, 3)])
    @slow
    def test_biases_of_adapters(self, mesh, enabled_at):
        check(FLUX, MESHES[mesh], BIASED, enabled_at)

    @parameterized.expand([("TP 2", 0), ("TP 3", 1), ("TP 3", 2)])
    @slow
    def test_fused_projections(self, mesh, enabled_at):
        check(FLUX, MESHES[mesh], ("fuse qkv", "load fused", "fuse", "unload fused"), enabled_at)

    @parameterized.expand([(mesh, at) for mesh in ("TP 2", "Ulysses 2") for at in (0, 3)])
    @slow
    def test_swapped_adapters_of_other_ranks(self, mesh, enabled_at):
        operations = ("prepare", "load one", "swap", "swap smaller", "swap larger", "fuse", "unfuse", "unload")
        check(FLUX, MESHES[mesh], operations, enabled_at)

    @parameterized.expand([(0,), (1,)])
    @slow
    def test_swapped_adapters_that_grow(self, enabled_at):
        check(FLUX, MESHES["TP 2"], ("load one", "swap larger", "swap smaller", "load two"), enabled_at)

    @parameterized.expand(
        [(name, mesh, at) for name in VARIANTS for mesh, at in (("TP 2", 0), ("TP 3", 2), ("Ulysses 2", 0))]
    )
    @slow
    def test_of_a_model(self, name, mesh, enabled_at):
        config, strategies = variants().get(name, (None, ()))
        if mesh not in strategies:
            self.skipTest(f"{name} has no {mesh}, or is not there")
        check(config, MESHES[mesh], ("load one", "load two", "set", "fuse two", "unfuse", "unload"), enabled_at)

    @parameterized.expand([(mesh,) for mesh in ("TP 2", "Ulysses 2")])
    def test_all_ranks_have_the_adapter_of_the_first(self, mesh):
        for error, effect in run_ranks(2, agreement_worker, MESHES[mesh]):
            assert error <= FLOAT32_BAR and effect > EFFECT, (error, effect)

    @parameterized.expand([("TP 2",), ("Ulysses 2",)])
    def test_save(self, mesh):
        with tempfile.TemporaryDirectory() as folder:
            for result in run_ranks(2, save_worker, MESHES[mesh], folder):
                assert "save a parallel one without it" in result.pop("upcast")
                assert result.pop("error") <= FLOAT32_BAR and result.pop("reloaded") <= FLOAT32_BAR
                assert all(result.values()), result

    def test_refusals(self):
        first, second = run_ranks(2, refusals_worker)
        expected = {
            "DoRA": "DoRA cannot be added to a FluxTransformer2DModel that is sharded",
            "a file of DoRA": "DoRA cannot be added",
            "PiSSA": "init_lora_weights='pissa'",
            "biases": "bias='all'",
            "modules": "modules_to_save=",
            "LoKr": "LOKR cannot be added",
            "LoHa": "LOHA cannot be added",
            "other adapters": "different models",
            "size mismatch": "size mismatch",
            "absent": "",
            "depthwise": "transformer_blocks.0.ff.conv_depth (conv_depthwise) cannot be sharded with its adapter",
            "DoRA before": "transformer_blocks.0.attn.to_q (column) cannot be sharded with its adapter, a DoraLinear",
            "LoKr before": "a peft.tuners.lokr.layer.",
        }
        for name, message in first.items():
            assert expected[name.partition(", ")[0]] in message, (name, message)
            assert "absent" in name or message == second[name], (name, message, second[name])
        assert first["absent, first"].startswith("rank 1 could not add an adapter: "), first["absent, first"]

    @slow
    def test_other_kinds_of_adapters_of_a_split_model(self):
        for errors in run_ranks(2, other_kinds_worker):
            assert max(errors.values()) <= FLOAT32_BAR, errors

    @slow
    def test_gradients(self):
        for errors in run_ranks(2, gradient_worker):
            assert len(errors) > 40 and max(errors.values()) <= FLOAT32_BAR, errors

    @slow
    def test_swapped_under_compiled_blocks(self):
        for errors, graphs in run_ranks(2, compiled_worker):
            assert max(errors.values()) <= FLOAT32_BAR, errors
            assert graphs == [graphs[0]] * len(graphs), f"recompiled between adapters: {graphs}"

    @parameterized.expand([("TP 2", False)])
    def test_pipeline(self, mesh, before):
        self.check_pipeline(mesh, before)

    @parameterized.expand([(mesh, before) for mesh in MESHES for before in (False, True)])
    @slow
    def test_pipeline_on_any_mesh(self, mesh, before):
        self.check_pipeline(mesh, before)

    def check_pipeline(self, mesh: str, before: bool) -> None:
        degrees = MESHES[mesh]
        with tempfile.TemporaryDirectory() as folder:
            for result in run_ranks(math.prod(degrees.values()), pipeline_worker, degrees, folder, before):
                assert max(result["errors"].values()) <= FLOAT32_BAR, result
                assert min(result["effects"][name] for name in ("load", "set", "scale", "fuse")) > EFFECT, result
