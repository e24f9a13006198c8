"""A step as a graph: emulated where there is no GPU, by a capture that keeps the call and its inputs."""

import contextlib
import copy
import math
import unittest
from collections.abc import Callable
from typing import Any
from unittest import mock

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline, FirstBlockCacheConfig
from packaging.version import Version
from parameterized import parameterized
from torch.utils._pytree import tree_leaves
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from diffusers_rocm import ParallelConfig, load_pipeline, parallelize
from diffusers_rocm.hooks import step_graph
from diffusers_rocm.hooks.step_graph import KEPT, WARM_UP, StepGraph, wrap_destroy_process_group
from diffusers_rocm.pipelines.model_folder import EMBEDDED_MODEL

from ..models.testing_utils.common import randn
from ..models.testing_utils.parallelism import FLOAT32_BAR
from ..models.transformers.test_models_transformer_flux import FluxTransformerTesterConfig
from ..models.transformers.test_models_transformer_wan import WanTransformerTesterConfig
from ..testing_utils import (
    message_of,
    relative_l2,
    run_ranks,
)


MESHES = ({"tp": 2}, {"ulysses": 2}, {"ring": 2})


class Recorder:
    """Stands for `step_graph.record`: a replay computes with the inputs that were captured, into the same answer."""

    def __init__(self):
        self.captures = 0

    def __call__(
        self, call: Callable[[], Any], device: torch.device, pool: Any
    ) -> tuple[Callable[[], None], Any, None]:
        self.captures += 1
        answer = call()

        def replay() -> None:
            for x, new in zip(tree_leaves(answer), tree_leaves(call()), strict=True):
                with torch.inference_mode(x.is_inference()):  # a GPU does not ask where it was captured
                    x.copy_(new)

        return replay, answer, None


def offloads_here() -> bool:
    """Before 0.42 diffusers offloads groups from an accelerator alone."""
    return Version(diffusers.__version__) >= Version("0.42") or torch.accelerator.is_available()


def emulated() -> mock._patch:
    return mock.patch.object(step_graph, "record", Recorder())


def steps_of(inputs: dict, count: int) -> list[dict]:
    """The inputs of some steps: latents and time are others in each."""
    latents = inputs["hidden_states"]
    return [
        {
            **inputs,
            "hidden_states": latents + randn(*latents.shape, seed=step).to(latents),
            "timestep": inputs["timestep"] / 2**step,
        }
        for step in range(count)
    ]


@torch.no_grad()
def parity_worker(name: str, degrees: dict[str, int]) -> dict:
    """Outputs are compared when all steps are done: none may be the graph's own memory."""
    config = {"flux": FluxTransformerTesterConfig, "wan": WanTransformerTesterConfig}[name]()
    model, steps = config.get_model(), steps_of(config.get_inputs(1), WARM_UP + 3)
    wanted = [config.get_output(model, inputs) for inputs in steps]
    model.enable_parallelism(config=ParallelConfig(**degrees))
    with emulated() as recorder:
        graph = StepGraph(model)
        outputs = [config.get_output(model, inputs) for inputs in steps]
        graph.remove()
        plain = config.get_output(model, steps[0])
    errors = [relative_l2(x, y) for x, y in zip(outputs, wanted, strict=True)]
    return {"errors": errors, "captures": recorder.captures, "removed": relative_l2(plain, wanted[0])}


@torch.no_grad()
def changes_worker() -> dict[str, int]:
    """How many graphs were captured in all after each change of the calls or of the model, each used some times."""
    config = FluxTransformerTesterConfig()
    model, counts = config.get_model(), {}
    model.enable_parallelism(config=ParallelConfig(tp=2))
    kinds = {rows: config.get_inputs(rows) for rows in (1, 2)}
    StepGraph(model)

    def use(name: str, inputs: dict) -> None:
        wanted = config.get_output(model, inputs) if name == "weights" else None
        for _ in range(WARM_UP + 2):
            output = config.get_output(model, inputs)
        assert wanted is None or torch.equal(output, wanted)
        counts[name] = recorder.captures

    with emulated() as recorder:
        use("one row", kinds[1])
        use("two rows", kinds[2])
        use("one row again", kinds[1])
        use("a number", {**kinds[1], "joint_attention_kwargs": {"scale": 1.0}})
        use("a number of another name", {**kinds[1], "joint_attention_kwargs": {"gamma": 1.0}})
        with torch.autocast("cpu", torch.bfloat16):
            use("autocast", kinds[1])
        model.proj_out.weight = torch.nn.Parameter(2 * model.proj_out.weight)
        use("weights", kinds[1])
        model.x_embedder.weight.data = model.x_embedder.weight.clone()
        use("address", kinds[1])
        model.proj_out.register_parameter("another", None)
        use("a name more", kinds[1])
        model.proj_out.forward = model.proj_out.forward  # as offloading puts its own there
        use("forward", kinds[1])
        attention = model.transformer_blocks[0].attn
        attention.processor = type(attention.processor)()
        use("processor", kinds[1])
        use("another dtype", {**kinds[1], "timestep": kinds[1]["timestep"].double()})
        holder = next(module for module in model.modules() if module._buffers)
        holder._buffers |= {name: x.clone() for name, x in holder._buffers.items()}
        use("buffer", kinds[1])
        quantize_(model.proj_out, Int8WeightOnlyConfig(version=2))
        use("quantised", kinds[1])
        model.proj_out.weight.scale = model.proj_out.weight.scale.clone()
        use("address of a part", kinds[1])
        old, model.proj_out = model.proj_out, copy.deepcopy(model.proj_out)
        if torch.distributed.get_rank() == 0:
            old.weight.scale = old.weight.scale.clone()
        use("a module, and on one rank the old one's weights", kinds[1])
        text = {"encoder_hidden_states": randn(1, 4, 32, seed=0), "txt_ids": torch.zeros(4, 3)}
        for scale in range(1, KEPT + 1):
            use("text", {**kinds[1], **text})
            use(f"scale {scale}", {**kinds[1], "joint_attention_kwargs": {"scale": 1.0 + scale}})
        use("text", {**kinds[1], **text})  # which has been used since others were
        use("scale 1 again", {**kinds[1], "joint_attention_kwargs": {"scale": 2.0}})
        counts["kept"] = len(model.around_call[0]._kinds)
    return counts


@torch.no_grad()
def alone_worker() -> float | None:
    """The first rank's error in what it computes by itself, when the model is no longer parallel."""
    config = FluxTransformerTesterConfig()
    model, inputs = config.get_model(), config.get_inputs(1)
    wanted = config.get_output(model, inputs)
    model.enable_parallelism(config=ParallelConfig(tp=2))
    with emulated():
        StepGraph(model)
        for _ in range(WARM_UP + 1):
            config.get_output(model, inputs)
        model.disable_parallelism()
        assert not hasattr(model, "around_call")
        return relative_l2(config.get_output(model, inputs), wanted) if torch.distributed.get_rank() == 0 else None


def refusals_worker() -> dict[str, str]:
    config, messages = FluxTransformerTesterConfig(), {}

    def refuse(name: str, prepare: Callable) -> None:
        model, inputs = config.get_model(), config.get_inputs(1)
        model.enable_parallelism(config=ParallelConfig(tp=2))
        prepare(model)
        StepGraph(model)

        @torch.no_grad()
        def run() -> None:
            for _ in range(WARM_UP + 1):
                with model.cache_context("cond"):
                    config.get_output(model, inputs)

        with emulated():
            messages[name] = message_of(run)

    def adapter(model: torch.nn.Module) -> None:
        from peft import LoraConfig

        model.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))

    def reads_on_the_host(model: torch.nn.Module) -> None:
        def fail(*_) -> None:
            if step_graph.record.captures:
                raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

        model.proj_out.register_forward_hook(fail)

    def ip_adapter(model: torch.nn.Module) -> None:
        model.transformer_blocks[0].attn.processor.scale = [1.0]

    cpu = torch.device("cpu")
    refuse("adapter", adapter)
    refuse("IP-Adapter", ip_adapter)
    refuse("cache", lambda model: model.enable_cache(FirstBlockCacheConfig(threshold=0.1)))
    if offloads_here():
        refuse("group offload", lambda model: model.enable_group_offload(cpu, cpu, offload_type="leaf_level"))
    refuse("host", reads_on_the_host)
    model, inputs = config.get_model(), config.get_inputs(1)
    StepGraph(model)
    with torch.no_grad():
        messages["object"] = message_of(
            config.get_output, model, inputs | {"joint_attention_kwargs": {"a": {}.keys()}}
        )
    pipe = DiffusionPipeline.from_pretrained(EMBEDDED_MODEL)
    with mock.patch.object(torch.cuda, "is_available", lambda: False):
        messages["no GPU"] = message_of(parallelize, pipe, ParallelConfig(tp=2), graph=True)
    return messages


def gradients_worker() -> tuple[int, bool]:
    config = FluxTransformerTesterConfig()
    model, inputs = config.get_model(), config.get_inputs(1)
    model.enable_parallelism(config=ParallelConfig(tp=2))
    StepGraph(model)
    with emulated() as recorder:
        for _ in range(WARM_UP + 1):
            config.get_output(model, inputs).sum().backward()
    return recorder.captures, model.x_embedder.weight.grad is not None


@torch.no_grad()
def one_fails_worker() -> tuple[str, float, int]:
    """What a rank is told where the second capture fails on one; the largest error of what both were asked before
    and after; and how many graphs were captured in all."""
    config = FluxTransformerTesterConfig()
    model, steps = config.get_model(), steps_of(config.get_inputs(1), 2 * WARM_UP + 4)
    another, outputs = config.get_inputs(2), []

    def no_memory(call: Callable[[], Any], *_: Any) -> None:
        call()
        raise RuntimeError("no memory\nat all")

    wanted = [config.get_output(model, each) for each in steps]
    model.enable_parallelism(config=ParallelConfig(tp=2))
    with emulated() as recorder:
        StepGraph(model)
        outputs += [config.get_output(model, each) for each in steps[: WARM_UP + 2]]
        for _ in range(WARM_UP):
            config.get_output(model, another)
        fails = mock.patch.object(step_graph, "record", no_memory)
        with fails if torch.distributed.get_rank() == 1 else contextlib.nullcontext():
            with pytest.raises((ValueError, RuntimeError)) as caught:
                config.get_output(model, another)
        outputs += [config.get_output(model, each) for each in steps[WARM_UP + 2 :]]
    return str(caught.value), max(map(relative_l2, outputs, wanted)), recorder.captures


def pipeline_worker(degrees: dict[str, int]) -> tuple[float, int]:
    """With guidance, whose exchange between ranks stays outside of the graph."""

    def pictures(pipe: DiffusionPipeline) -> torch.Tensor:
        pipe.set_progress_bar_config(disable=True)
        arguments = {"num_inference_steps": 5, "output_type": "pt", "generator": torch.Generator().manual_seed(0)}
        arguments |= {"height": 64, "width": 64, "max_sequence_length": 16}
        return pipe("a red circle", negative_prompt="a blue square", true_cfg_scale=3.0, **arguments).images

    wanted = pictures(DiffusionPipeline.from_pretrained(EMBEDDED_MODEL))
    ParallelConfig(**degrees).axes()  # before torch is told of GPUs, for which some versions would make groups
    with emulated() as recorder, mock.patch.object(torch.cuda, "is_available", lambda: True):
        pipe = load_pipeline(EMBEDDED_MODEL, ParallelConfig(**degrees), graph=True, device="cpu")
        error = relative_l2(pictures(pipe), wanted)
    graph, groups = pipe.transformer.around_call[0], torch.distributed
    assert graph._kinds
    another = groups.new_group()
    groups.barrier(another)  # a rank that goes away while the other still connects makes it fail
    groups.destroy_process_group(another)
    assert graph._kinds  # other ranks may not be in that group, and keep theirs
    wrap_destroy_process_group(lambda _: None)(pipe.transformer.parallelism.axes.tp.group)
    assert not graph._kinds
    graph._kinds = ["another"]
    groups.destroy_process_group()
    assert not graph._kinds  # it would wait for them for ever
    return error, recorder.captures


@torch.no_grad()
def two_models_worker() -> tuple[list[str], list[str]]:
    """Of two models in one mesh, whose memory goes with the graph of the first, and with that of the second."""
    config, inputs = FluxTransformerTesterConfig(), FluxTransformerTesterConfig().get_inputs(1)
    models, found = [config.get_model() for _ in range(2)], []
    for model in models:
        model.enable_parallelism(config=ParallelConfig(ulysses=2))
    graphs = [StepGraph(model) for model in models]
    with emulated():
        for model in models * (WARM_UP + 1):
            config.get_output(model, inputs)
    for graph in graphs:
        assert graph.captured
        with (
            mock.patch.object(graph._split, "by_copies") as by_copies,
            mock.patch.object(step_graph, "forget_places") as places,
            mock.patch.object(step_graph.host_memory, "forget") as host,
        ):
            graph.remove()
        assert not graph._kinds and by_copies.call_args_list == [mock.call(False)]
        assert places.call_args_list == host.call_args_list
        found.append([call.args[0].group_name for call in places.call_args_list])
    axes = vars(model.parallelism.axes).values()
    assert set(found[1]) == {axis.group.group_name for axis in axes if axis.group is not None}
    return tuple(found)


@torch.no_grad()
def one_rank_worker() -> tuple[list[int], float, list[str]]:
    """The first rank's weight goes elsewhere: captures before and after, and the largest error. Then what each says of
    calls that are not alike, and of a model that one rank alone has moved."""
    config, first = FluxTransformerTesterConfig(), torch.distributed.get_rank() == 0
    model, steps = config.get_model(), steps_of(config.get_inputs(1), WARM_UP + 3)
    wanted, captures, errors, messages = [config.get_output(model, inputs) for inputs in steps], [], [], []
    model.enable_parallelism(config=ParallelConfig(tp=2))

    def use() -> None:
        errors.extend(relative_l2(config.get_output(model, each), x) for each, x in zip(steps, wanted, strict=True))
        captures.append(recorder.captures)

    with emulated() as recorder:
        graph = StepGraph(model)
        use()
        if first:
            model.x_embedder.weight.data = model.x_embedder.weight.clone()
        use()
        scale = {"joint_attention_kwargs": {"scale": 1.0 + first}}
        messages.append(message_of(config.get_output, model, steps[0] | scale))
        messages.append(message_of(config.get_output, model, config.get_inputs(3 + first)))
        graph.forget()
        config.get_output(model, steps[0])
        if first:
            model.to("cpu")
        messages.append(message_of(config.get_output, model, steps[0]))
    return captures, max(errors), messages


class TestStepGraph(unittest.TestCase):
    @parameterized.expand([*(("flux", degrees) for degrees in MESHES), ("wan", {"ulysses": 2})])
    def test_parity(self, name, degrees):
        for result in run_ranks(2, parity_worker, name, degrees):
            assert max(result["errors"]) <= FLOAT32_BAR and result["removed"] <= FLOAT32_BAR, result
            assert result["captures"] == 1, result

    def test_other_calls_and_weights_are_captured_anew(self):
        for counts in run_ranks(2, changes_worker):
            assert counts.pop("kept") == KEPT
            many = [counts.pop(name) for name in ("text", *(f"scale {scale}" for scale in range(1, KEPT + 1)))]
            assert counts.pop("scale 1 again") == 21 and many == [20, 17, 18, 19, 20], (counts, many)
            assert list(counts.values()) == [1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], counts

    def test_what_no_graph_can_hold(self):
        for messages in run_ranks(2, refusals_worker):
            assert "has an adapter beside it: fuse and unload adapters, or" in messages["adapter"]
            assert "the scale of the IP-Adapter of this FluxTransformer2DModel would be" in messages["IP-Adapter"]
            assert "has a cache, which decides on the host" in messages["cache"]
            if offloads_here():
                assert "brought to the device one by one" in messages["group offload"]
            assert messages["host"].endswith("leave graphs out: operation not permitted when stream is capturing")
            assert messages["object"] == (
                "a dict_keys is given to this FluxTransformer2DModel, and what it holds may be other in each step: "
                "leave graphs out"
            )
            assert "needs a GPU of CUDA or ROCm" in messages["no GPU"]

    def test_what_one_rank_alone_does(self):
        """All capture anew: what one rank launches as ever and the other replays would never meet on GPUs."""
        for captures, error, messages in run_ranks(2, one_rank_worker):
            assert captures == [1, 2] and error <= FLOAT32_BAR, (captures, error)
            for message, (first, second) in zip(messages, ((1, 1), (1, 1), (1, 2)), strict=True):
                kind = "of kind [0-9a-f]{8}"
                self.assertRegex(
                    message,
                    rf"not at the same call \(rank 0: call {first} {kind}, rank 1: call {second} {kind}\): give all "
                    "of them the same shapes and numbers, and move the model on all or none",
                )

    def test_memory_goes_with_the_last_graph_of_a_group(self):
        for first, second in run_ranks(2, two_models_worker):
            assert first == [] and second

    def test_goes_with_the_parallelism(self):
        error, _ = run_ranks(2, alone_worker)
        assert error <= FLOAT32_BAR

    def test_gradients_pass_by(self):
        for captures, trained in run_ranks(2, gradients_worker):
            assert captures == 0 and trained

    def test_a_capture_that_fails_on_one_rank(self):
        """Others would wait for it in theirs; after it all are captured anew."""
        (other, error, captures), (own, *same) = run_ranks(2, one_fails_worker)
        self.assertRegex(other, "^rank 1 could not capture a step of this FluxTransformer2DModel: .*: no memory$")
        self.assertRegex(own, "^a step of this FluxTransformer2DModel cannot be captured, .*: no memory$")
        self.assertLessEqual(max(error, same[0]), FLOAT32_BAR)
        self.assertEqual((captures, same[1]), (3, 2))

    @parameterized.expand([({"tp": 2},), ({"cfg": 2, "tp": 2},)])
    def test_pipeline(self, degrees):
        for error, captures in run_ranks(math.prod(degrees.values()), pipeline_worker, degrees):
            # Both branches of guidance have prompts of one length.
            assert error <= FLOAT32_BAR and captures == 1, (error, captures)
