"""Plans that users write: what is refused before anything is split, lists of tensors, attention that is not seen."""

import unittest

import diffusers
import pytest
import torch
from diffusers.models._modeling_parallel import ContextParallelOutput
from parameterized import parameterized
from torch import Tensor, nn

from diffusers_rocm import ContextParallelConfig
from diffusers_rocm.distributed.mesh import Axes
from diffusers_rocm.hooks.context_parallel import split_sequences
from diffusers_rocm.hooks.sequence_split import SequenceSplit
from diffusers_rocm.models.plans.context_plan import (
    ContextParallelPlan,
    KeyMask,
    SplitAlready,
    gather,
    leading_count,
    split,
    trailing_count,
)
from diffusers_rocm.models.plans.plan import match

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


def hang(model: nn.Module, plan: ContextParallelPlan) -> list:
    """What enabling does of itself, without ranks: the model may be on meta."""
    return split_sequences(model, SequenceSplit(type(model).__name__, plan, Axes.of_mesh(None), "p2p"))


def meta_model(name: str, **init) -> nn.Module:
    with torch.device("meta"):
        return getattr(diffusers, name)(**init)


class PlainAttention(nn.Module):
    """Attention from plain products, by a class that says so."""

    def __init__(self, width: int):
        super().__init__()
        self.inner = nn.Linear(width, 3 * width)

    def forward(self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
        q, k, v = self.inner(hidden_states).chunk(3, -1)
        return (q @ k.transpose(1, 2)).softmax(-1) @ v


class Mixer(nn.Module):
    """The same, known by its projections alone."""

    def __init__(self, width: int):
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width) for _ in range(3))


class TestUnseenAttention(unittest.TestCase):
    @parameterized.expand([(PlainAttention,), (Mixer,), (nn.MultiheadAttention,)])
    def test_attention_without_a_processor_is_refused(self, cls):
        model = meta_model("CogVideoXTransformer3DModel", num_layers=2, num_attention_heads=2)
        model.transformer_blocks[1].mix = cls(16) if cls is not nn.MultiheadAttention else cls(16, 2)
        with pytest.raises(ValueError) as caught:
            hang(model, ContextParallelPlan(IMAGE))
        assert f"transformer_blocks.1.mix ({cls.__name__}) has no processor" in str(caught.value), caught.value
        assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == 0
        assert hang(model, ContextParallelPlan(IMAGE, whole=("transformer_blocks.*.mix",)))

    def test_pooling_of_the_text(self):
        model = meta_model("MochiTransformer3DModel", num_layers=1)
        with pytest.raises(ValueError, match="time_embed.pooler \\(MochiAttentionPool\\) has no processor"):
            hang(model, ContextParallelPlan(IMAGE))
        assert hang(model, ContextParallelPlan(IMAGE, whole=("time_embed.pooler",)))

    @parameterized.expand(
        [
            ("AuraFlowTransformer2DModel",),
            ("ChromaTransformer2DModel",),
            ("CogVideoXTransformer3DModel",),
            ("CogView4Transformer2DModel",),
            ("ConsisIDTransformer3DModel",),
            ("Lumina2Transformer2DModel",),
            ("PixArtTransformer2DModel",),
            ("SD3Transformer2DModel",),
            ("SanaTransformer2DModel",),
            ("SkyReelsV2Transformer3DModel",),
            ("StableAudioDiTModel",),
        ]
    )
    def test_attention_of_diffusers_is_seen(self, name):
        depth = {"num_mmdit_layers": 1, "num_single_dit_layers": 1} if name.startswith("Aura") else {"num_layers": 1}
        assert hang(meta_model(name, **depth), ContextParallelPlan(IMAGE))


@torch.no_grad()
def lists_worker() -> tuple[float, list[str]]:
    """Error under a plan with lists, and what is said of lists that do not fit the tensors."""
    config = FluxTransformerTesterConfig()
    model, inputs = config.get_model(), config.get_dummy_inputs(1)
    for_all_tokens = randn(1, 1, 128, seed=40)
    inputs["controlnet_block_samples"] = [for_all_tokens, randn(1, 35, 128, seed=41)]
    want = config.get_output(model, inputs)

    def run(residuals: list, outputs: list) -> Tensor:
        plan = {"": {**FLUX, "controlnet_block_samples": residuals}, "single_transformer_blocks.1": outputs}
        model.enable_parallelism(config=ContextParallelConfig(2), cp_plan=plan)
        try:
            return config.get_output(model, inputs)
        finally:
            model.disable_parallelism()

    messages, error = [], relative_l2(run([None, split(1, 3)], [None, gather()]), want)
    for residuals, outputs in (([split(1, 3)], [None, gather()]), ([None, split(1, 3)], [None])):
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
            ("gathered inputs of no stream", {**IMAGE, "blocks": {"text": gather()}}, "'blocks'"),
            ("a mask of outputs", {**IMAGE, "blocks": {0: KeyMask("hidden_states")}}, "'blocks'"),
            ("a count of outputs", {**IMAGE, "blocks": {0: leading_count()}}, "'blocks'"),
            ("counts in a list", {**IMAGE, "blocks": {"counts": [leading_count()]}}, "'blocks'"),
        ]
    )
    def test_message(self, name, modules, part):
        with pytest.raises(ValueError) as caught:
            ContextParallelPlan(modules)
        assert part in str(caught.value), caught.value

    @parameterized.expand([({"alone": {"blocks.*": "audio"}},), ({"causal": "audio"},)])
    def test_unknown_stream(self, rules):
        with pytest.raises(ValueError, match="audio is no stream of this context-parallel plan, whose streams are"):
            ContextParallelPlan(IMAGE, **rules)

    def test_what_fits(self):
        lists = {"blocks.0": {"residuals": (split(1, 3), None)}, "blocks.1": [gather(), None]}
        rope = {"rope": {0: split(0, 2, output=True)}, "proj_out": ContextParallelOutput(1)}
        assert ContextParallelPlan({**IMAGE, **lists, **rope, "blocks.2": {"num_tokens": leading_count()}})
        text = {"text": gather(stream="text"), "mask": KeyMask("text"), "count": trailing_count()}
        assert ContextParallelPlan({**IMAGE, "blocks.2": text, "blocks.-1": {"text": SplitAlready("hidden_states")}})

    def test_indices_from_the_end(self):
        model = nn.Sequential(nn.ModuleList(nn.Identity() for _ in range(5)))
        model.config = {"decoders": 2, "none": 0}
        rules = dict.fromkeys(("0.-1", "0.-decoders", "0.-none?"))
        found = [[path for path, _ in modules] for _, _, modules in match(model, rules)]
        assert found == [["0.4"], ["0.3"], []]

    def test_another_main_stream(self):
        plan = ContextParallelPlan({"": {"latents": split(1, 3)}}, streams=("latents",), main="latents")
        assert plan.main == "latents"

    def test_lists(self):
        for error, (inputs, outputs) in run_ranks(2, lists_worker):
            assert error <= FLOAT32_BAR, error
            assert "controlnet_block_samples is no list of 1 tensors" in inputs, inputs
            assert "single_transformer_blocks.1 has more outputs than the 1 that the plan gathers" in outputs, outputs
