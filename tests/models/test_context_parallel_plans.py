"""Plans that users write: what is refused before anything is split and lists of tensors."""

import unittest

import pytest
import torch
from diffusers.models._modeling_parallel import ContextParallelOutput
from parameterized import parameterized
from torch import Tensor

from diffusers_rocm import ContextParallelConfig
from diffusers_rocm.models.plans.context_plan import ContextParallelPlan, LeadingTokens, gather, split

from ..testing_utils import relative_l2, run_ranks
from .testing_utils.common import randn
from .testing_utils.parallelism import FLOAT32_BAR
from .transformers.test_models_transformer_flux import FluxTransformerTesterConfig


IMAGE = {"": {"hidden_states": split(1, 3)}}
FLUX = {
    "hidden_states": split(1, 3),
    "encoder_hidden_states": split(1, 3),
    "img_ids": split(0, 2),
    "txt_ids": split(0, 2),
}


@torch.no_grad()
def lists_worker() -> tuple[float, list[str]]:
    """Error under a plan with lists, and what is said of lists that do not fit the tensors."""
    config = FluxTransformerTesterConfig()
    model, inputs = config.get_model(), config.get_dummy_inputs(1)
    for_all_tokens = randn(1, 1, 128, seed=40)
    inputs["controlnet_block_samples"] = [randn(1, 35, 128, seed=41), for_all_tokens]
    want = config.get_output(model, inputs)

    def run(residuals: list, outputs: list) -> Tensor:
        plan = {"": {**FLUX, "controlnet_block_samples": residuals}, "single_transformer_blocks.1": outputs}
        model.enable_parallelism(config=ContextParallelConfig(2), cp_plan=plan)
        try:
            return config.get_output(model, inputs)
        finally:
            model.disable_parallelism()

    messages, error = [], relative_l2(run([split(1, 3), None], [None, gather()]), want)
    for residuals, outputs in (([split(1, 3)], [None, gather()]), ([split(1, 3), None], [None])):
        with pytest.raises(ValueError) as caught:
            run(residuals, outputs)
        messages.append(str(caught.value))
    return error, messages


class TestPlans(unittest.TestCase):
    @parameterized.expand(
        [
            (
                "outputs alone",
                {"rope": {0: split(0, 2, output=True)}, "proj_out": gather()},
                "no argument 'hidden_states'",
            ),
            ("gathered alone", {"proj_out": gather()}, "no argument 'hidden_states'"),
            ("a stream in a list", {"": {"hidden_states": [split(1, 3)]}}, "a stream of tokens is one"),
            ("an output as an input", {**IMAGE, "rope": {0: split(0, 2)}}, "'rope'"),
            ("an input as an output", {**IMAGE, "rope": {"ids": split(0, 2, output=True)}}, "'rope'"),
            ("an output in a list", {**IMAGE, "rope": {0: [split(0, 2, output=True)]}}, "'rope'"),
            ("gathered inputs", {**IMAGE, "proj_out": {"hidden_states": gather()}}, "'proj_out'"),
            ("split outputs", {**IMAGE, "proj_out": [split(1, 3)]}, "'proj_out'"),
            ("nothing", {**IMAGE, "proj_out": None}, "'proj_out': None cannot be"),
            ("a count of outputs", {**IMAGE, "blocks": {0: LeadingTokens()}}, "'blocks'"),
            ("counts in a list", {**IMAGE, "blocks": {"counts": [LeadingTokens()]}}, "'blocks'"),
        ]
    )
    def test_message(self, name, modules, part):
        with pytest.raises(ValueError) as caught:
            ContextParallelPlan(modules)
        assert part in str(caught.value), caught.value

    def test_what_fits(self):
        lists = {"blocks.0": {"residuals": (split(1, 3), None)}, "blocks.1": [gather(), None]}
        rope = {"rope": {0: split(0, 2, output=True)}, "proj_out": ContextParallelOutput(1)}
        assert ContextParallelPlan({**IMAGE, **lists, **rope, "blocks.2": {"num_tokens": LeadingTokens()}})

    def test_another_main_stream(self):
        plan = ContextParallelPlan({"": {"latents": split(1, 3)}}, streams=("latents",), main="latents")
        assert plan.main == "latents"

    def test_lists(self):
        for error, (inputs, outputs) in run_ranks(2, lists_worker):
            assert error <= FLOAT32_BAR, error
            assert "controlnet_block_samples is no list of 1 tensors" in inputs, inputs
            assert "single_transformer_blocks.1 has more outputs than the 1 that the plan gathers" in outputs, outputs
