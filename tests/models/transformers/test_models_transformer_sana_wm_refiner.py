import unittest

import diffusers
import pytest
import torch

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


if not hasattr(diffusers, "SanaWMLTX2RefinerTransformer3DModel"):
    pytest.skip("this diffusers has no SANA-WM", allow_module_level=True)

from diffusers.models.transformers.transformer_sana_wm_refiner import SanaWMRefinerKVCache  # noqa: E402


class SanaWMRefinerTransformerTesterConfig(BaseModelTesterConfig):
    """A block of frames without a cache: rotary embeddings interleaved, a mask for the text, a step for each token."""

    model_class = diffusers.SanaWMLTX2RefinerTransformer3DModel
    frames, height, width = 3, 3, 5
    without_effect = {"*audio*": "its forward leaves audio out"}

    def get_init_dict(self):
        return {
            "in_channels": 8,
            "out_channels": 8,
            "num_attention_heads": 5,
            "attention_head_dim": 12,
            "cross_attention_dim": 60,
            "audio_in_channels": 6,
            "audio_out_channels": 6,
            "audio_num_attention_heads": 7,
            "audio_attention_head_dim": 8,
            "audio_cross_attention_dim": 56,
            "num_layers": 2,
            "caption_channels": 16,
            "rope_double_precision": False,
        }

    def get_dummy_inputs(self, batch_size=1):
        mask = torch.ones(batch_size, 11, dtype=torch.long)
        mask[0, 4:] = 0
        tokens = self.frames * self.height * self.width
        return {
            "hidden_states": randn(batch_size, tokens, 8, seed=1),
            "encoder_hidden_states": randn(batch_size, 11, 16, seed=3),
            "timestep": 1000 * torch.linspace(0.1, 0.9, batch_size * tokens).view(batch_size, tokens),
            "encoder_attention_mask": mask,
        }

    def rotary(self, model, inputs, start: int, frames: int):
        hidden_states = inputs["hidden_states"]
        positions, size = list(range(start, start + frames)), (self.height, self.width)
        return model.build_rotary_emb_for_absolute_positions(
            len(hidden_states), positions, *size, hidden_states.device, 24.0
        )

    def get_output(self, model, inputs):
        rotary = self.rotary(model, inputs, 4, self.frames)
        return model(**inputs, video_rotary_emb=rotary, return_dict=False)[0].flatten()


class SanaWMRefinerGatedTransformerTesterConfig(SanaWMRefinerTransformerTesterConfig):
    """Rotary embeddings split, gates, another processor for the text."""

    def get_init_dict(self):
        return {**super().get_init_dict(), "rope_type": "split", "gated_attn": True, "perturbed_attn": True}


class SanaWMRefinerCachedTransformerTesterConfig(SanaWMRefinerTransformerTesterConfig):
    """As the pipeline goes: keys of a first frame are kept, and of a refined block; the next block attends to both."""

    def get_output(self, model, inputs):
        cache, frame = SanaWMRefinerKVCache(len(model.transformer_blocks)), self.height * self.width

        def step(mode, start, frames, kept):
            block = {name: inputs[name][:, : frames * frame] for name in ("hidden_states", "timestep")}
            rotary = self.rotary(model, inputs, start, frames)
            cache.sink_pe = self.rotary(model, inputs, start - kept - 1, 1) if kept is not None else None
            cached = {"video_rotary_emb": rotary, "kv_cache": cache, "kv_cache_mode": mode, "return_dict": False}
            return model(**{**inputs, **block, **cached})[0].flatten()

        outputs = [step("capture_pre_rope", 0, 1, None)]
        for layer in cache.layer_caches:
            layer.store_sink(*layer.get_captured_pre_rope())
        outputs += [step("inject", 1, 3, 0), step("inject_and_capture_post_rope", 1, 3, 0)]
        for layer in cache.layer_caches:
            layer.store_history(*(x[:, -2 * frame :] for x in layer.get_captured_post_rope()))
        return torch.cat([*outputs, step("inject", 4, 3, 2)])


class TestSanaWMRefinerTransformer(SanaWMRefinerTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestSanaWMRefinerGatedTransformer(SanaWMRefinerGatedTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestSanaWMRefinerCachedTransformer(
    SanaWMRefinerCachedTransformerTesterConfig, PlanTesterMixin, unittest.TestCase
):
    pass
