"""What holds for the plans of all classes, beside the parity of each."""

import inspect
import unittest
from collections.abc import Mapping

import diffusers
import torch
from packaging.version import Version
from parameterized import parameterized

import diffusers_rocm
from diffusers_rocm import TensorParallelConfig
from diffusers_rocm.models.plans import (
    CONTEXT_PARALLEL_PLANS,
    TENSOR_PARALLEL_PLANS,
    WITHOUT_TENSOR_PARALLEL_PLAN,
    get_context_parallel_plan,
    get_tensor_parallel_plan,
)
from diffusers_rocm.models.plans.context_plan import Refused
from diffusers_rocm.models.plans.plan import match

from ..testing_utils import message_of, relative_l2, run_ranks
from .testing_utils.common import BaseModelTesterConfig
from .testing_utils.parallelism import FLOAT32_BAR
from .testing_utils.plans import refusal_worker
from .testing_utils.variants import by_class, variants
from .transformers.test_models_transformer_easyanimate import EasyAnimateTransformerTesterConfig


_TESTED = variants()
VARIANTS = by_class(_TESTED)
# Those whose sequences can be split.
SPLIT = by_class({name: each for name, each in _TESTED.items() if "Ulysses 2" in each[1]})

# Arguments that no tiny model is given, and why. Numbers and flags are not asked for.
_LATENT_CONSISTENCY = "of latent consistency models, for whose embedding no checkpoint has weights"
_TENSOR_PARALLEL_ALONE = "has one plan, for tensor parallelism, of which it takes no notice"
NOT_GIVEN = {
    "BriaTransformer2DModel": {
        "pooled_projections": "not used",
        "guidance": "no checkpoint embeds it",
        "controlnet_single_block_samples": "diffusers indexes them with a float, which fails",
    },
    "BriaFiboTransformer2DModel": {"pooled_projections": "not used"},
    "CogVideoXTransformer3DModel": {"timestep_cond": _LATENT_CONSISTENCY},
    "CogView4Transformer2DModel": {"image_rotary_emb": "goes to the blocks as the model's own does"},
    "ConsisIDTransformer3DModel": {"timestep_cond": _LATENT_CONSISTENCY},
    "EasyAnimateTransformer3DModel": {"timestep_cond": _LATENT_CONSISTENCY},
    "Flux2Transformer2DModel": {"kv_cache": "goes with kv_cache_mode; TestFlux2CachedReferences"},
    "FluxControlNetModel": {"controlnet_mode": "of union ControlNets; TestFluxControlNetVariants"},
    "LongCatImageTransformer2DModel": {"guidance": "not used"},
    "QwenImageTransformer2DModel": {"guidance": "no checkpoint embeds it"},
    "QwenImage21Transformer2DModel": dict.fromkeys(("kv_cache", "kv_cache_mode"), "TestQwenImage21Cache"),
    "SanaWMTransformer3DModel": {
        "mask": "another name of encoder_attention_mask",
        "data_info": "a picture that is joined to the latents' channels",
        "chunk_size": "a number",
        **dict.fromkeys(("cam_pos_embeds", "pos_embeds", "raymats"), "made as the model makes its own"),
    },
    "WanAnimateTransformer3DModel": {"motion_encode_batch_size": "a number"},
    "SanaControlNetModel": {"attention_mask": _TENSOR_PARALLEL_ALONE},
    "SanaTransformer2DModel": {"attention_mask": _TENSOR_PARALLEL_ALONE},
    "SanaVideoTransformer3DModel": dict.fromkeys(
        ("guidance", "attention_mask", "controlnet_block_samples"), _TENSOR_PARALLEL_ALONE
    ),
}

# What a plan refuses, and something that it must refuse.
REFUSED = {
    ("AllegroTransformer3DModel", "attention_mask"): torch.ones(1, 3, 6, 10),
    ("CogView4Transformer2DModel", "attention_mask"): torch.ones(1, 11),
    ("Flux2Transformer2DModel", "kv_cache_mode?"): "extract",
    ("GlmImageTransformer2DModel", "attention_mask"): torch.ones(1, 7),
    ("Kandinsky5Transformer3DModel", "sparse_params"): {"to_fractal": True},
    ("LTX2VideoTransformer3DModel", "video_self_attention_mask?"): torch.ones(1, 45, 45),
    ("SD3Transformer2DModel", "skip_layers"): [0],
}


FUSED = ("to_qkv", "to_kv", "to_added_qkv")


@torch.no_grad()
def fused_worker(config: BaseModelTesterConfig) -> tuple[float, float]:
    """The errors of a sharded model whose projections were fused, and of what becomes of it again."""
    model, inputs = config.get_model(), config.get_inputs(2)
    wanted = config.get_output(model, inputs)
    model.enable_parallelism(config=TensorParallelConfig(tp=2))
    model.fuse_qkv_projections()
    error = relative_l2(config.get_output(model, inputs), wanted)
    fused = [module for path, module in model.named_modules() if path.endswith(FUSED)]
    assert fused and all(hasattr(module, "sharding") for module in fused)
    model.disable_parallelism()
    return error, relative_l2(config.get_output(model, inputs), wanted)


class TestPlans(unittest.TestCase):
    def test_a_config_that_the_plan_is_not_for(self):
        config = EasyAnimateTransformerTesterConfig()
        changed = {**config.get_init_dict(), "mmdit_layers": config.get_init_dict()["num_layers"] - 1}
        with torch.device("meta"):
            model = config.model_class(**changed)
        message = message_of(diffusers_rocm.verify_plan, model, 2)
        assert "EasyAnimateTransformer3DModel cannot be sharded: blocks without weights for the text" in message

    @parameterized.expand(sorted(WITHOUT_TENSOR_PARALLEL_PLAN.items()))
    def test_a_class_without_a_plan_says_why(self, name, why):
        cls = getattr(diffusers, name, None)
        if cls is None:
            self.skipTest(f"this diffusers has no {name}")
        model = object.__new__(cls)
        torch.nn.Module.__init__(model)
        assert name not in TENSOR_PARALLEL_PLANS
        assert f"{name} has no tensor-parallel plan: {why}; the nearest classes" in message_of(
            diffusers_rocm.verify_plan, model, 2
        )

    def test_a_subclass_declares_that_its_modules_are_the_same(self):
        class Undeclared(diffusers.FluxTransformer2DModel):
            pass

        class Declared(diffusers.FluxTransformer2DModel):
            parallel_plans_of = diffusers.FluxTransformer2DModel

        class BelowDeclared(Declared):
            pass

        class Stranger(diffusers.FluxTransformer2DModel):
            parallel_plans_of = diffusers.SD3Transformer2DModel

        class Misspelt(diffusers.FluxTransformer2DModel):
            parallel_plans_of = "FluxTransformer2DModel"

        flux = diffusers.FluxTransformer2DModel
        for find in (get_tensor_parallel_plan, get_context_parallel_plan):
            assert find(Declared) is find(flux)
            for cls in (Undeclared, BelowDeclared):
                assert "parallel_plans_of = FluxTransformer2DModel" in message_of(find, cls)
            assert "not among its base classes" in message_of(find, Stranger)
            assert "= 'FluxTransformer2DModel', which is not among" in message_of(find, Misspelt)

    @parameterized.expand(sorted(VARIANTS))
    @unittest.skipIf(Version(diffusers.__version__) < Version("0.42"), "tiny models are made for the newest diffusers")
    @torch.no_grad()
    def test_parity_was_tried_with_every_argument(self, name):
        """Of the model, and of the modules at which its sequences are split."""
        cls = VARIANTS[name][0].model_class
        plan = CONTEXT_PARALLEL_PLANS.get(name)
        rules = {path: how for path, how in plan.modules.items() if isinstance(how, Mapping)} if plan else {}
        given: dict[str, set[str]] = {path: set() for path in ("", *rules)}
        for config in VARIANTS[name]:
            model = config.get_model()
            watched = [(rule, modules) for rule, _, modules in match(model, dict.fromkeys(rules))]
            for rule, modules in [*watched, ("", [("", model)])]:
                for _, module in modules:
                    module.register_forward_pre_hook(_notes(given[rule]), with_kwargs=True)
            config.get_output(model, config.get_inputs(2))
        asked = {
            key
            for key, parameter in list(inspect.signature(cls.forward).parameters.items())[1:]
            if not isinstance(parameter.default, (int, float)) and not key.endswith("kwargs")
        }
        assert asked - given[""] - NOT_GIVEN.get(name, {}).keys() - _refused(rules.get("", {})) == set()
        assert NOT_GIVEN.get(name, {}).keys() <= asked - given[""]
        for path, how in rules.items():
            named = {key.removesuffix("?") for key in how if isinstance(key, str)}
            missing = named - given[path] - _refused(how)
            assert not missing, f"{path or name}: parity was never tried with {missing}"

    @parameterized.expand(sorted(VARIANTS.keys() & TENSOR_PARALLEL_PLANS.keys()))
    def test_little_is_whole_on_every_rank(self, name):
        """Of the model of real size: a reason for what is not cut is not enough."""
        with torch.device("meta"):
            model = VARIANTS[name][0].model_class(**VARIANTS[name][0].real_init_dict)
        report = diffusers_rocm.verify_plan(model, 4)
        assert report.replicated_bytes <= 0.05 * report.full_bytes, report.replicated_bytes / report.full_bytes
        assert max(report.rank_bytes) <= 0.3 * report.full_bytes, report.rank_bytes

    @parameterized.expand(sorted(SPLIT))
    @unittest.skipIf(Version(diffusers.__version__) < Version("0.42"), "tiny models are made for the newest diffusers")
    def test_attention_that_a_context_plan_names_is_there(self, name):
        """In some model of the class; what comes with an adapter aside."""
        plan = CONTEXT_PARALLEL_PLANS[name]
        named = [*plan.whole, *plan.whole_queries, *plan.main_asks, *plan.alone, *plan.idle, *plan.kept]
        models = [config.get_model() for config in SPLIT[name]]
        for path in named:
            assert any(found for model in models for *_, found in match(model, {path: ""})), path

    @parameterized.expand(
        sorted(name for name in VARIANTS if hasattr(getattr(diffusers, name), "fuse_qkv_projections"))
    )
    def test_projections_are_fused_in_a_sharded_model(self, name):
        config = VARIANTS[name][0]
        model = config.get_model()
        try:
            model.fuse_qkv_projections()
            config.get_output(model, config.get_inputs(1))
            fuses = any(path.endswith(FUSED) for path, _ in model.named_modules())
        except (AttributeError, RuntimeError):  # the class has it from a base class, and cannot
            fuses = False
        if not fuses:
            self.skipTest("diffusers fuses nothing of it")
        for error, whole in run_ranks(2, fused_worker, config):
            assert max(error, whole) <= FLOAT32_BAR, (error, whole)

    def test_everything_that_is_refused_is_listed_here(self):
        refused = {
            (name, key)
            for name, plan in CONTEXT_PARALLEL_PLANS.items()
            for how in plan.modules.values()
            for key in (how if isinstance(how, Mapping) else ())
            if isinstance(how[key], Refused)
        }
        # One has a variant, and one a test, of its own.
        tried_apart = {
            ("GlmImageTransformer2DModel", "kv_caches"),
            ("QwenImage21Transformer2DModel", "attention_mask"),
        }
        assert refused - REFUSED.keys() == tried_apart
        assert REFUSED.keys() <= refused

    @parameterized.expand([key for key in sorted(REFUSED) if key[0] in SPLIT])
    def test_what_a_plan_refuses(self, name, key):
        argument, value, config = key.removesuffix("?"), REFUSED[name, key], SPLIT[name][0]
        if argument not in inspect.signature(config.model_class.forward).parameters:
            self.skipTest(f"this diffusers has no {argument}")
        for message in run_ranks(2, refusal_worker, config, {"ulysses": 2}, 1, {argument: value}):
            assert f"a split sequence cannot go with {argument}" in message, message


def _refused(how: Mapping) -> set[str]:
    return {key.removesuffix("?") for key, each in how.items() if isinstance(each, Refused)}


def _notes(given: set[str]):
    """A hook that notes which arguments a module is given."""

    def hook(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
        given.update(key for key, value in bound.items() if value is not None)

    return hook
