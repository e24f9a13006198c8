"""Guidance whose branches are shared by ranks: unmodified pipelines, the whole loop, against one process."""

import functools
import inspect
import re
import unittest
from types import SimpleNamespace

import diffusers
import pytest
import torch
import torch.distributed as dist
from diffusers import FlowMatchEulerDiscreteScheduler, HiDreamImagePipeline, StableDiffusion3PAGPipeline, WanPipeline
from diffusers.guiders import ClassifierFreeGuidance
from packaging.version import Version
from parameterized import parameterized

from diffusers_rocm import CFGParallelConfig, ParallelConfig, parallelize
from diffusers_rocm.hooks.around_call import AroundCall
from diffusers_rocm.pipelines.denoisers import denoisers_of
from diffusers_rocm.pipelines.parallel_call import _no_guidance

from ..models.testing_utils.common import randn
from ..models.testing_utils.parallelism import FLOAT32_BAR
from ..models.testing_utils.variants import variants
from ..models.transformers.test_models_transformer_flux import FluxTransformerTesterConfig
from ..models.transformers.test_models_transformer_hidream_image import HiDreamImageTransformerTesterConfig
from ..testing_utils import message_of, relative_l2, run_ranks, slow
from .testing_utils import PIPELINES, build, latents


def count_rows(pipe) -> list[int]:
    """Rows that this rank's transformers compute from here on, in each call."""
    rows = []

    def count(block, args, kwargs, output):
        rows.append((*args, *kwargs.values())[0].shape[0])

    for model in denoisers_of(pipe):
        blocks = next(module for module in model.children() if isinstance(module, torch.nn.ModuleList))
        blocks[0].register_forward_hook(count, with_kwargs=True)
    return rows


def parity_worker(name: str, degrees: dict, prompts: int) -> dict:
    pipe, arguments = build(name), PIPELINES[name].call(prompts)
    classes = [type(each) for each in (pipe, pipe.scheduler, *denoisers_of(pipe))]
    wanted, rows = latents(pipe, arguments), count_rows(pipe)
    latents(pipe, arguments)
    alone = sum(rows)
    parallelize(pipe, ParallelConfig(**degrees))
    outputs = [latents(pipe, arguments)]
    rows.clear()
    outputs.append(latents(pipe, arguments))
    work = sum(rows) / alone
    for model in denoisers_of(pipe):
        model.disable_parallelism()
    outputs.append(latents(pipe, arguments))
    return {
        "errors": [relative_l2(output, wanted) for output in outputs],
        "work": work,
        "restored": classes == [type(each) for each in (pipe, pipe.scheduler, *denoisers_of(pipe))],
    }


@torch.no_grad()
def rows_worker(names: list[str]) -> dict[str, float | str]:
    """Each tiny model, a batch of two by rows; the error, or what it says."""
    results = {}
    for name in names:
        config, _ = variants()[name]
        model, inputs = config.get_model(), config.get_inputs(2)
        if name == "ZImageTransformer":  # whose samples are of several sizes
            inputs["x"] = [inputs["x"][0], inputs["x"][0].flip(-1)]
            inputs["cap_feats"] = [x[:21] for x in inputs["cap_feats"]]
        wanted = config.get_output(model, inputs)
        model.enable_parallelism(config=CFGParallelConfig(cfg=2))
        try:
            results[name] = relative_l2(config.get_output(model, inputs), wanted)
        except (ValueError, RuntimeError) as error:
            results[name] = str(error)
    return results


def errors_worker() -> dict:
    messages, rows = {}, {}
    for name, change in (
        ("flux", {"true_cfg_scale": 1.0}),
        ("qwenimage", {"negative_prompt_embeds": None}),
        ("wan", {"guidance_scale": 1.0}),
        ("ltx", {"guidance_scale": 1.0}),
    ):
        pipe = build(name)
        parallelize(pipe, CFGParallelConfig(cfg=2))
        counted = count_rows(pipe)
        messages[name] = message_of(latents, pipe, PIPELINES[name].call() | change)
        rows[name] = len(counted)

    class Quiet(WanPipeline):
        """Does not say whether it runs guidance."""

        do_classifier_free_guidance = False

    pipe = build("wan")
    pipe.__class__ = Quiet
    parallelize(pipe, CFGParallelConfig(cfg=2))
    counted, arguments = count_rows(pipe), PIPELINES["wan"].call()
    messages["quiet"] = message_of(latents, pipe, arguments)
    rows["quiet"] = len(counted)
    Quiet.do_classifier_free_guidance = True
    messages["after"] = str(relative_l2(latents(pipe, arguments), latents(build("wan"), arguments)) <= FLOAT32_BAR)

    pipe = build("sd3")
    parallelize(pipe, CFGParallelConfig(cfg=2))
    skipping = {"skip_guidance_layers": [0], "skip_layer_guidance_start": -1.0, "skip_layer_guidance_stop": 1.0}
    messages["three calls"] = message_of(latents, pipe, PIPELINES["sd3"].call() | skipping)
    return messages | {f"{name} rows": count for name, count in rows.items()}


def hidream() -> HiDreamImagePipeline:
    pipe = HiDreamImagePipeline(
        FlowMatchEulerDiscreteScheduler(), *[None] * 9, HiDreamImageTransformerTesterConfig().get_model()
    )
    pipe.default_sample_size = 10
    pipe.set_progress_bar_config(disable=True)
    return pipe


def perturbed() -> StableDiffusion3PAGPipeline:
    """Its processors take the batch for branches."""
    plain = build("sd3")
    nothing = [None] * 6
    pipe = StableDiffusion3PAGPipeline(
        plain.transformer, plain.scheduler, None, *nothing, pag_applied_layers=["blocks.1"]
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def layers_worker() -> dict:
    """Arguments whose batch is not the first dim, or that look as if they had an item for each of it."""
    llama = {f"{name}prompt_embeds_llama3": randn(3, 1, 7, 16, seed=3 + len(name)) for name in ("", "negative_")}
    t5 = {f"{name}prompt_embeds_t5": randn(1, 9, 24, seed=1 + len(name)) for name in ("", "negative_")}
    pooled = {f"{name}pooled_prompt_embeds": randn(1, 12, seed=5 + len(name)) for name in ("", "negative_")}
    cases = {"hidream": (hidream, llama | t5 | pooled | {"height": 80, "width": 80})}
    skipping = {"skip_guidance_layers": [0, 1], "skip_layer_guidance_start": -1.0, "skip_layer_guidance_stop": 1.0}
    cases["skipped layers"] = (functools.partial(build, "sd3"), PIPELINES["sd3"].call(2) | skipping)
    errors = {}
    for name, (make, arguments) in cases.items():
        wanted, pipe = latents(make(), arguments), make()
        parallelize(pipe, CFGParallelConfig(cfg=2))
        errors[name] = relative_l2(latents(pipe, arguments), wanted)
    return errors


def dependent_rows_worker() -> dict[str, str | float]:
    arguments = PIPELINES["sd3"].call(2) | {"pag_scale": 3.0}
    wanted, checked, unchecked = latents(perturbed(), arguments), perturbed(), perturbed()
    parallelize(checked, CFGParallelConfig(cfg=2))
    parallelize(unchecked, CFGParallelConfig(cfg=2), rank_check="off")
    return {
        "message": message_of(latents, checked, arguments),
        "unchecked": relative_l2(latents(unchecked, arguments), wanted),
    }


@torch.no_grad()
def no_room_worker() -> str:
    """One rank has no room for all rows, which each computes once to compare."""
    config = FluxTransformerTesterConfig()
    model, inputs = config.get_model(), config.get_inputs(2)
    model.enable_parallelism(config=CFGParallelConfig(cfg=2))

    def before(module, args):
        if len(args[0]) == 2 and dist.get_rank() == 1:
            raise torch.OutOfMemoryError("no room")

    model.x_embedder.register_forward_pre_hook(before)
    with pytest.raises(RuntimeError) as caught:
        model(**inputs)
    return str(caught.value)


class Interruption(AroundCall):
    def __init__(self, model: torch.nn.Module, at: int):
        super().__init__(model)
        self.left = at

    def around(self, call, args, kwargs):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return call(*args, **kwargs)


def interrupted_worker() -> float:
    """A run that ends between the two calls of a step leaves nothing to the next one."""
    pipe, arguments = build("flux"), PIPELINES["flux"].call()
    wanted = latents(pipe, arguments)
    parallelize(pipe, CFGParallelConfig(cfg=2))
    interruption = Interruption(pipe.transformer, at=6)
    with pytest.raises(KeyboardInterrupt):
        latents(pipe, arguments, steps=6)
    interruption.remove()
    return relative_l2(latents(pipe, arguments), wanted)


@torch.no_grad()
def reading_worker() -> dict:
    """What may and may not be done with a prediction before the other branch was called."""
    config = FluxTransformerTesterConfig()
    model, inputs = config.get_model(), config.get_inputs(1)
    shorter = {"encoder_hidden_states": inputs["encoder_hidden_states"][:, :7], "txt_ids": inputs["txt_ids"][:7]}
    other = {**inputs, **shorter}
    wanted, wanted_other = (model(**each, return_dict=False)[0] for each in (inputs, other))
    model.enable_parallelism(config=CFGParallelConfig(cfg=2))

    def predict(each: dict, **changes) -> torch.Tensor:
        return model(**each, **changes)

    results = {}
    for _ in range(2):
        views = predict(inputs).sample
        kept = {
            "itself": views,
            "slice": views[:, :20],
            "chunk": views.chunk(2, dim=1)[1],
            "reshaped": views.transpose(1, 2).unsqueeze(0),
            "same dtype": views.float(),
            "cast": views.double(),
            "cast, cut and cast": views.bfloat16()[:, :20].float(),
            "clone": views.clone(),
        }
        assert views.shape == wanted.shape and views.dtype == torch.float32 and len(views) == 1
        last = predict(other).sample
        made = {"itself": wanted, "slice": wanted[:, :20], "chunk": wanted.chunk(2, dim=1)[1], "same dtype": wanted}
        made |= {"reshaped": wanted.transpose(1, 2).unsqueeze(0), "cast": wanted, "clone": wanted}
        made["cast, cut and cast"] = wanted.bfloat16()[:, :20].float()
        results |= {name: relative_l2(x, made[name]) for name, x in kept.items()}
        results["last"] = relative_l2(last, wanted_other)
        results["arithmetic"] = relative_l2(last + 3 * (views - last), wanted_other + 3 * (wanted - wanted_other))
    readers = {
        "mul": lambda x: x * 2,
        "sum": lambda x: x.sum(),
        "item": lambda x: x[0, 0, 0].item(),
        "sum of a cast": lambda x: x.double().sum(),
        "in place": lambda x: x.mul_(2),
        "set": lambda x: x.__setitem__(0, 1.0),
        "list": lambda x: x.tolist(),
        "numpy": lambda x: x.numpy(),
        "truth": lambda x: bool(x[0, 0, 0]),
        "third argument": lambda x: torch.add(wanted, x),
        "as input": lambda x: predict({**inputs, "hidden_states": x}),
    }
    for name, read in readers.items():
        results[name] = message_of(read, predict(inputs).sample)
        model.parallelism.hooks[-1].begin_run()
    with torch.enable_grad():
        results["gradients"] = message_of(predict, inputs)
    with torch.inference_mode():
        x = predict(inputs).sample
        results["in place, in inference mode"] = message_of(x.mul_, 2)
        model.parallelism.hooks[-1].begin_run()
    return results


MESHES = [
    *((name, {"cfg": 2}, 1) for name, each in PIPELINES.items() if each.guidance),
    ("flux", {"cfg": 2}, 2),
    ("sd3", {"cfg": 2}, 3),
    ("z_image", {"cfg": 2}, 3),
    ("flux", {"cfg": 2, "ulysses": 2}, 1),
    ("flux", {"cfg": 2, "tp": 2}, 1),
    ("wan", {"cfg": 2, "ring": 2}, 1),
    ("wan22", {"cfg": 2, "tp": 2}, 1),
    ("ltx", {"cfg": 2, "ulysses": 2}, 1),
]


# Of a batch of two: what cannot be shared by rows, and what its error says.
NOT_BY_ROWS = {
    "GlmImageCachedTransformer": "Cannot match 2 cached samples to batch size 1",
    "LatteTransformer": "fails on a part of its rows (The size of tensor a (15) must match",  # a mask for each frame
    "OmniGenTransformer": "by the numbers of its rows, so that they cannot be shared by cfg=2; use dp, ulysses or tp",
}
# One picture in a list, or a cache of their own, in each call.
OF_ONE_ROW = ("Cosmos3", "SanaWM", "WanAnimate2")


class TestCFGParallel(unittest.TestCase):
    @slow
    @unittest.skipIf(Version(diffusers.__version__) < Version("0.42"), "the tiny models are made for the newest")
    def test_every_model_by_rows(self):
        """A length, a layer or a coordinate must not be taken for a row, nor the other way round."""
        names = [name for name in variants() if not name.startswith(OF_ONE_ROW) and "ControlNet" not in name]
        for results in run_ranks(2, rows_worker, names):
            for name, result in results.items():
                if name in NOT_BY_ROWS:
                    assert NOT_BY_ROWS[name] in result, (name, result)
                else:
                    assert isinstance(result, float) and result <= FLOAT32_BAR, (name, result)

    @parameterized.expand(MESHES)
    def test_whole_loop(self, name, degrees, prompts):
        world = 2 * max([degree for axis, degree in degrees.items() if axis != "cfg"], default=1)
        for result in run_ranks(world, parity_worker, name, degrees, prompts):
            assert max(result["errors"]) <= FLOAT32_BAR and result["restored"], result
            assert result["work"] == 0.5, result

    def test_no_guidance_is_an_error_before_the_first_step(self):
        for messages in run_ranks(2, errors_worker):
            assert "runs no guidance (true_cfg_scale=1.0)" in messages["flux"]
            assert "runs no guidance (it has no negative_prompt)" in messages["qwenimage"]
            assert "runs no guidance (guidance_scale=1.0)" in messages["wan"], messages
            assert "runs no guidance (guidance_scale=1.0)" in messages["ltx"], messages
            assert all("or use dp, ulysses or tp" in messages[name] for name in ("flux", "qwenimage", "wan", "ltx"))
            assert [messages[f"{name} rows"] for name in ("flux", "qwenimage", "wan", "ltx")] == [0] * 4
            # Where only the calls tell: at the end of the first step.
            assert "before it had called it 2 times" in messages["quiet"] and messages["quiet rows"] == 1, messages
            assert messages["after"] == "True"
            assert "before it had called it 2 times" in messages["three calls"]

    def test_guiders_that_guide_nothing(self):
        """They count predictions by the step, which is that of an earlier run."""
        off = "its ClassifierFreeGuidance asks for one prediction a step"
        for guider, wanted in (
            (ClassifierFreeGuidance(guidance_scale=3.0), None),
            (ClassifierFreeGuidance(guidance_scale=1.0), off),
            (ClassifierFreeGuidance(guidance_scale=3.0, stop=0.5), None),
            (ClassifierFreeGuidance(guidance_scale=3.0, enabled=False), off),
        ):
            assert _no_guidance(SimpleNamespace(guider=guider), {}) == wanted
            guider.set_state(step=3, num_inference_steps=4, timestep=torch.tensor(0))
            assert _no_guidance(SimpleNamespace(guider=guider), {}) == wanted

    @parameterized.expand(
        [
            ("Flux2Pipeline", True, "its guidance goes into the transformer"),
            ("FluxFillPipeline", True, "its guidance goes into the transformer"),
            ("Flux2KleinKVPipeline", False, "it takes no guidance"),
            ("DiTPipeline", False, None),  # of classes: two rows, without a negative prompt
            ("OmniGenPipeline", False, None),
        ]
    )
    def test_pipelines_without_a_negative_prompt(self, name, embeds, wanted):
        if not hasattr(diffusers, name):
            self.skipTest(f"diffusers {diffusers.__version__} has no {name}")
        known = inspect.signature(getattr(diffusers, name).__call__).parameters
        pipe = SimpleNamespace(transformer=SimpleNamespace(config=SimpleNamespace(guidance_embeds=embeds)))
        assert _no_guidance(pipe, {key: each.default for key, each in known.items()}) == wanted

    def test_rows_that_are_not_where_others_are(self):
        for errors in run_ranks(2, layers_worker):
            assert max(errors.values()) <= FLOAT32_BAR, errors

    def test_rows_that_depend_on_each_other(self):
        for results in run_ranks(2, dependent_rows_worker):
            assert "answers a part of its rows otherwise than all of them" in results["message"], results
            assert results["unchecked"] > 1e-2, results  # what the check is for

    def test_no_room_for_all_rows_is_said_on_all_ranks(self):
        first, second = run_ranks(2, no_room_worker)
        assert re.fullmatch("rank 1 could not run FluxTransformer2DModel on its rows: .*no room", first), first
        assert second == "no room"

    def test_interrupted_between_the_branches(self):
        for error in run_ranks(2, interrupted_worker):
            assert error <= FLOAT32_BAR

    def test_predictions_that_are_yet_to_come(self):
        for results in run_ranks(2, reading_worker):
            assert "shares predictions, not gradients" in results.pop("gradients")
            for name, result in results.items():
                if isinstance(result, str):
                    assert "used a prediction of FluxTransformer2DModel" in result, (name, result)
                else:
                    assert result <= FLOAT32_BAR, (name, result)


if __name__ == "__main__":
    unittest.main()
