"""What a step feeds each model with a plan: it fits the model of real size, and tells ranks that share it apart."""

import functools
import unittest

import diffusers
import torch
from diffusers import ModelMixin
from packaging.version import Version
from parameterized import parameterized
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from diffusers_rocm import ParallelConfig
from diffusers_rocm.benchmarks.known_models import KNOWN_MODELS, KnownModel, Size, build, count_blocks, inputs, made
from diffusers_rocm.models.plans import CONTEXT_PARALLEL_PLANS, TENSOR_PARALLEL_PLANS
from diffusers_rocm.planner.rehearsal import rehearsed

from ..models.test_plans import VARIANTS
from ..models.testing_utils.workers import FLOAT32_BAR
from ..testing_utils import relative_l2, run_ranks, slow_unless


# Where the tiny config of a class' tests is not one for pictures of some pixels, or for these inputs.
TINY: dict[str, dict] = {
    "hunyuan-dit": {"text_len_t5": 7},
    "ltx-2": {"audio_num_attention_heads": 5, "audio_cross_attention_dim": 40},
    "cosmos": {"max_size": (4, 16, 18)},
    "easyanimate": {"in_channels": 4},
    "motif-video": {"num_single_layers": 4, "num_decoder_layers": 2},
}
# Of those whose forward reads numbers that it has computed, which a rehearsal has none of: what leaves few blocks.
FEW_BLOCKS: dict[str, dict] = {
    "nucleus-image": {"num_layers": 4, "num_experts": 8},
    "qwen-image-2.1": {"num_layers": 1},
    "lumina2": {"num_layers": 1, "num_refiner_layers": 1},
    "mochi": {"num_layers": 2},
    "glm-image": {"num_layers": 1},
    "hidream-i1": {"num_layers": 1, "num_single_layers": 1, "llama_layers": [0, 1]},
    "hunyuan-image": {"num_layers": 1, "num_single_layers": 1},
    "omnigen": {"num_layers": 1},
    "hunyuan-video-1.5": {"num_layers": 1},
    "framepack": {"num_layers": 1, "num_single_layers": 1},
    "sana-wm": {"num_layers": 4},
}
# Meshes that the plans of a class have no way for.
CANNOT: dict[str, tuple[str, ...]] = {
    "nucleus-image": ("ulysses",),
    "sana": ("ulysses",),
    "sana-video": ("ulysses",),
    "sana-wm": ("ulysses",),
}
# One forward of these is no step: it reads what another one, or the pipeline by the model's own parts, has made.
NO_STEP = {"SanaWMLTX2RefinerTransformer3DModel", "WanAnimate2Transformer3DModel"}
MOST_USED = {"flux", "flux2", "hunyuan-video", "ltx", "qwen-image", "sd3.5-large", "wan"}
MESHES = {"tp": {"tp": 2}, "ulysses": {"ulysses": 2}}


def small(known: KnownModel) -> Size:
    pixels = None if known.size.height == 1 else 5 * known.multiple
    frames = None if known.size.frames == 1 else 1 + (2 if pixels else 10) * known.frames_apart  # or latents of sound
    return known.sized(pixels, frames, 7 if known.text else None)


def of_zeros(known: KnownModel, few: dict) -> ModelMixin:
    """Of real width, in memory that is had where it is written to."""
    model = made(known, few)
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.zeros(weight.shape)))
    return model


@torch.no_grad()
def parity_worker(name: str) -> dict[str, float]:
    """Relative L2 to one rank of each mesh, and of one rank with another text."""
    known, cpu = KNOWN_MODELS[name], torch.device("cpu")
    config = {**VARIANTS[known.cls][0].get_init_dict(), **TINY.get(name, {})}

    def predict(degrees: dict[str, int], changed: str | None = None) -> torch.Tensor:
        model = build(known, config, cpu, torch.float32)
        assert count_blocks(model) > 0
        given = inputs(known, small(known), model, torch.float32)
        if changed:
            given[changed] = tree_map_only(torch.Tensor, lambda x: x.flip(-1), given[changed])
        if degrees:
            model.enable_parallelism(config=ParallelConfig(**degrees))
        return tree_leaves(model(**given))[0]

    wanted = predict({})
    assert wanted.isfinite().all() and wanted.std() > 0.01
    found = {} if known.text is None else {"text": relative_l2(predict({}, known.text), wanted)}
    for mesh, degrees in MESHES.items():
        if mesh not in CANNOT.get(name, ()):
            found[mesh] = relative_l2(predict(degrees), wanted)
    return found


@unittest.skipIf(Version(diffusers.__version__) < Version("0.42"), "tiny models are made for the newest diffusers")
class TestInputsOfKnownModels(unittest.TestCase):
    def test_all_that_have_a_plan_are_known(self):
        """But ControlNets, whose step is that of the model that they are beside."""
        planned = {name for name in TENSOR_PARALLEL_PLANS.keys() | CONTEXT_PARALLEL_PLANS if "ControlNet" not in name}
        assert (planned & VARIANTS.keys()) - NO_STEP == {known.cls for known in KNOWN_MODELS.values()}

    @parameterized.expand(KNOWN_MODELS)
    def test_inputs_fit_the_real_model(self, name):
        slow_unless(name in MOST_USED)
        known, shapes = KNOWN_MODELS[name], []

        def run(model: ModelMixin, size: Size) -> None:
            made = tree_leaves(model(**inputs(known, size, model, torch.float32)))
            shapes.extend(x.shape for x in made if isinstance(x, torch.Tensor))

        if name in FEW_BLOCKS:
            with torch.no_grad():
                run(of_zeros(known, FEW_BLOCKS[name]), small(known))
        else:
            make = functools.partial(getattr(diffusers, known.cls), **known.config)
            rehearsed(make, lambda model: run(model, known.size), torch.float32)
        assert shapes[0].numel() > 0

    @parameterized.expand(KNOWN_MODELS)
    def test_parity(self, name):
        for errors in run_ranks(2, parity_worker, name):
            assert errors.pop("text", 1) > 1e-3, "the text does nothing"
            assert errors and max(errors.values()) <= FLOAT32_BAR, errors


if __name__ == "__main__":
    unittest.main()
