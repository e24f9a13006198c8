"""The models that benchmarks know: of their published sizes, with both plans, and shapes that can be made smaller."""

import unittest

import diffusers
import pytest
import torch
from parameterized import parameterized
from torch.utils._pytree import tree_leaves

from diffusers_rocm.benchmarks.known_models import KNOWN_MODELS, Size, build, count_blocks, inputs
from diffusers_rocm.models.plans import get_context_parallel_plan, get_tensor_parallel_plan


CPU = torch.device("cpu")
SMALL = {
    "flux": {"num_layers": 1, "num_single_layers": 2, "num_attention_heads": 4},
    "flux2": {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2, "joint_attention_dim": 64},
    "chroma": {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2, "approximator_hidden_dim": 64},
    "qwen-image": {"num_layers": 1, "num_attention_heads": 2},
    "sd3.5-large": {"num_layers": 1, "num_attention_heads": 2, "caption_projection_dim": 128},
    "z-image": {"n_layers": 1, "n_refiner_layers": 1, "dim": 256, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 64},
    "lumina2": {
        "num_layers": 1,
        "num_refiner_layers": 1,
        "num_attention_heads": 6,
        "num_kv_heads": 2,
        "hidden_size": 576,
    },
    "mochi": {"num_layers": 1, "num_attention_heads": 8},
    "cogvideox": {"num_layers": 1, "num_attention_heads": 2},
    "hunyuan-video": {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2},
    "wan": {"num_layers": 1, "num_attention_heads": 2, "ffn_dim": 64},
    "ltx": {"num_layers": 1, "num_attention_heads": 2, "cross_attention_dim": 128},
}
# Of the published checkpoints, in billions: as their model cards and files say.
PARAMETERS = {
    "flux": 11.9,
    "flux2": 32.2,
    "chroma": 8.9,
    "qwen-image": 20.4,
    "sd3.5-large": 8.06,
    "z-image": 6.15,
    "lumina2": 2.61,
    "mochi": 10.0,
    "cogvideox": 5.57,
    "hunyuan-video": 12.8,
    "wan": 14.3,
    "ltx": 1.92,
}
# Of others, as their authors round them.
ROUNDED = {
    "allegro": 2.8,
    "cosmos": 7,
    "easyanimate": 12,
    "framepack": 13,
    "hunyuan-video-1.5": 8.3,
    "kandinsky5": 2,
    "ltx-2": 19,
    "motif-video": 1.9,
    "sana-wm": 2.6,
    "skyreels-v2": 14,
    "auraflow": 6.8,
    "bria": 4,
    "cogview4": 6,
    "ernie-image": 8,
    "fibo": 8,
    "glm-image": 7,
    "hidream-i1": 17,
    "hunyuan-dit": 1.5,
    "hunyuan-image": 17,
    "joyimage-edit": 16,
    "longcat-image": 6,
    "nucleus-image": 17,
    "omnigen": 3.8,
    "pixart-sigma": 0.6,
}


class TestKnownModels(unittest.TestCase):
    @parameterized.expand(SMALL)
    def test_size(self, name):
        """As the published model has it; both plans are there; a forward of its inputs is finite."""
        known = KNOWN_MODELS[name]
        if not hasattr(diffusers, known.cls):
            self.skipTest(f"diffusers {diffusers.__version__} has no {known.cls}")
        cls = getattr(diffusers, known.cls)
        get_tensor_parallel_plan(cls), get_context_parallel_plan(cls, None)
        with torch.device("meta"):
            count = sum(x.numel() for x in cls(**known.config).parameters())
        assert count / 1e9 == pytest.approx(PARAMETERS[name], rel=0.01)
        model = build(known, SMALL[name], CPU, torch.float32)
        assert 1 <= count_blocks(model) <= 4  # by which the bar goes
        size = known.sized(128, 1 + known.frames_apart if known.size.frames > 1 else None, 16)
        with torch.no_grad():
            output = tree_leaves(model(**inputs(known, size, model, torch.float32)))[0]
        assert output.isfinite().all() and output.std() > 0.01

    @parameterized.expand(ROUNDED)
    def test_rounded_size(self, name):
        known = KNOWN_MODELS[name]
        if not hasattr(diffusers, known.cls):
            self.skipTest(f"diffusers {diffusers.__version__} has no {known.cls}")
        with torch.device("meta"):
            count = sum(x.numel() for x in getattr(diffusers, known.cls)(**known.config).parameters())
        assert count / 1e9 == pytest.approx(ROUNDED[name], rel=0.07)

    def test_sizes_keep_their_shape(self):
        assert KNOWN_MODELS["hunyuan-video"].sized(144, None, None) == Size(144, 256, 129, 256)
        assert KNOWN_MODELS["wan"].sized(None, 5, 7) == Size(480, 832, 5, 7)
        for known in KNOWN_MODELS.values():
            assert known.size.height % known.multiple == known.size.width % known.multiple == 0, known
            assert known.sized(known.size.height, known.size.frames, None) == known.size


if __name__ == "__main__":
    unittest.main()
