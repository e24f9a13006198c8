"""A step of one process as a graph, emulated (`test_step_graph`)."""

import copy
import itertools
import unittest
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from diffusers_rocm.distributed.graph_calls import call_of_a_graph, current_call
from diffusers_rocm.hooks import step_graph
from diffusers_rocm.hooks.step_graph import KEPT, PATIENCE, WARM_UP, StepGraph, wrap_destroy_process_group

from ..models.testing_utils.parallelism import FLOAT32_BAR
from ..models.transformers.test_models_transformer_flux import FluxTransformerTesterConfig
from ..testing_utils import message_of, relative_l2
from .test_step_graph import emulated


class TestStepGraphOfOne(unittest.TestCase):
    @torch.no_grad()
    def test_a_copied_model_has_a_graph_of_its_own(self):
        model, x = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.ones(1, 2)
        with emulated():
            graph = StepGraph(model)
            for _ in range(WARM_UP + 1):
                model(x)
            copied = copy.deepcopy(model)
            assert graph._kinds and not copied.around_call[0]._kinds
            copied[0].weight.add_(1)
            for _ in range(WARM_UP + 2):
                assert torch.equal(copied(x), copied[0](x)) and torch.equal(model(x), model[0](x))
            wrap_destroy_process_group(lambda _: None)()
            assert not graph._kinds and not copied.around_call[0]._kinds
            copied.around_call[0].remove()
            assert not hasattr(copied, "around_call") and model.around_call == [graph]

    def test_one_graph_a_model(self):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        StepGraph(model)
        assert message_of(StepGraph, model) == (
            "the steps of this Sequential are a graph already: remove() it, or keep it"
        )
        assert len(model.around_call) == 1

    @torch.no_grad()
    def test_adapters_that_were_fused_and_unloaded(self):
        from peft import LoraConfig

        config = FluxTransformerTesterConfig()
        model, inputs = config.get_model(), config.get_inputs(1)
        model.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
        wanted = config.get_output(model, inputs)
        model.fuse_lora()
        model.unload_lora()
        with emulated() as recorder:
            StepGraph(model)
            for _ in range(WARM_UP + 2):
                assert relative_l2(config.get_output(model, inputs), wanted) <= FLOAT32_BAR
        assert recorder.captures == 1

    @torch.no_grad()
    def test_what_is_asked_while_a_step_is_replayed(self):
        """An answer of modules that are no more is nobody's; their memory is there until then, unless all is moved."""
        model, x, said = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.ones(1, 2), []
        holds = step_graph._Fixed.holds

        def record(call, *_):
            captured, answer = model[0], call()
            return lambda: (said.append("replay"), answer.copy_(captured(x))), answer, None

        def asked(fixed):
            said.append("asked")
            return holds(fixed)

        def call() -> list[str]:
            said.clear()
            assert torch.equal(model(x), model[0](x))
            return [*said]

        def memory() -> StorageWeakRef:
            return StorageWeakRef(model[0].weight.untyped_storage())

        with mock.patch.object(step_graph._Fixed, "holds", asked), mock.patch.object(step_graph, "record", record):
            StepGraph(model)
            for change in (
                lambda: setattr(model, "0", torch.nn.Linear(2, 2)),
                lambda: model.append(torch.nn.Identity()),
            ):
                for _ in range(WARM_UP + 1):
                    call()
                assert call() == ["replay", "asked"]
                change()
                assert call() == ["replay", "asked"] and call() == ["asked"]
            kept = memory()
            model[0].weight.data = model[0].weight + 1
            assert not kept.expired()
            call()
            assert kept.expired()
            kept = memory()
            model.double()
            assert kept.expired()

    @torch.no_grad()
    def test_what_never_becomes_a_graph_is_said_once(self):
        def said(step: Callable[[torch.nn.Module, int], Any]) -> list[str]:
            model = torch.nn.Sequential(torch.nn.Linear(2, 2))
            StepGraph(model)
            with emulated() as recorder, mock.patch.object(step_graph.logger, "warning") as warning:
                for index in range(3 * PATIENCE):
                    step(model, index)
            assert recorder.captures == 0 and not model.around_call[0].captured
            return [call.args[0] for call in warning.call_args_list]

        def moves(model: torch.nn.Module, _: int) -> None:
            model[0].weight.data = model[0].weight.clone()
            model(torch.ones(1, 2))

        shapes = said(lambda model, index: model(torch.ones(1 + index % (KEPT + 1), 2)))
        with torch.enable_grad():
            gradients = said(lambda model, _: model(torch.ones(1, 2)))
        for messages, reason in (
            (shapes, "its calls are of more kinds than 4, as by a number that is another in each"),
            (said(moves), "its modules, or where its weights and buffers are, change from call to call"),
            (gradients, "gradients are enabled: call it under torch.no_grad()"),
        ):
            assert messages == [f"12 calls of this Sequential were no graph: {reason}"], messages
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        StepGraph(model)
        with emulated() as recorder, mock.patch.object(step_graph.logger, "warning") as warning:
            for index in range(3 * PATIENCE):  # as many kinds as are kept, in turn
                model(torch.ones(1 + index % KEPT, 2))
        assert recorder.captures == KEPT and not warning.called

    @torch.no_grad()
    def test_an_answer_that_no_graph_can_give(self):
        class Answer:
            def __init__(self, x: torch.Tensor):
                self.x = x

        model = torch.nn.Linear(2, 2)
        model.forward = Answer
        StepGraph(model)
        with emulated():
            for _ in range(WARM_UP):
                model(torch.ones(1))
            assert (
                message_of(model, torch.ones(1))
                == "this Linear answers a Answer, which no graph can: leave graphs out"
            )

    def test_inference_mode(self):
        """What was captured in it is replayed outside of it, and the other way round."""
        for inside, outside in itertools.permutations((torch.inference_mode, torch.no_grad)):
            model = torch.nn.Sequential(torch.nn.Linear(2, 2))
            StepGraph(model)
            with emulated() as recorder:
                for step in range(WARM_UP + 4):
                    with inside() if step < WARM_UP + 2 else outside():
                        x = torch.full((1, 2), float(step))
                        assert torch.equal(model(x), model[0](x))
            assert recorder.captures == 1

    def test_a_call_is_of_its_thread(self):
        with call_of_a_graph(captured=True), ThreadPoolExecutor(1) as other:
            assert current_call().captured and other.submit(current_call).result() is None
        assert current_call() is None
