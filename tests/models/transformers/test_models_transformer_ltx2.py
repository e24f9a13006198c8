import inspect
import unittest

import torch
from diffusers import LTX2VideoTransformer3DModel

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


class LTX2TransformerTesterConfig(BaseModelTesterConfig):
    """2.0: rotary embeddings interleaved, fewer features for audio than for video, a mask for the text."""

    model_class = LTX2VideoTransformer3DModel

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
        return {
            "hidden_states": randn(batch_size, 3 * 3 * 5, 8, seed=1),
            "audio_hidden_states": randn(batch_size, 13, 6, seed=2),
            "encoder_hidden_states": randn(batch_size, 11, 16, seed=3),
            "audio_encoder_hidden_states": randn(batch_size, 11, 16, seed=4),
            "timestep": torch.tensor([500.0, 250.0])[:batch_size],
            "encoder_attention_mask": mask,
            "audio_encoder_attention_mask": mask,
            "num_frames": 3,
            "height": 3,
            "width": 5,
            "audio_num_frames": 13,
        }


class LTX23TransformerTesterConfig(LTX2TransformerTesterConfig):
    """2.3: rotary embeddings split, gates, modulated prompts, a timestep for each token of the video."""

    def get_init_dict(self):
        return {
            **super().get_init_dict(),
            "rope_type": "split",
            "audio_num_attention_heads": 5,  # diffusers splits by the number of the video's heads
            "audio_cross_attention_dim": 40,
            "gated_attn": True,
            "cross_attn_mod": True,
            "audio_gated_attn": True,
            "audio_cross_attn_mod": True,
            "use_prompt_embeddings": False,
            "perturbed_attn": True,
        }

    def get_dummy_inputs(self, batch_size=1):
        timestep = torch.full((batch_size, 45), 500.0)
        timestep[:, :15] = 0
        sigma = torch.tensor([500.0, 250.0])[:batch_size]
        return {
            **super().get_dummy_inputs(batch_size),
            "encoder_hidden_states": randn(batch_size, 11, 60, seed=3),
            "audio_encoder_hidden_states": randn(batch_size, 11, 40, seed=4),
            "timestep": timestep,
            "audio_timestep": sigma,
            "sigma": sigma,
            "use_cross_timestep": True,
        }


class LTX23GuidedTransformerTesterConfig(LTX23TransformerTesterConfig):
    """Spatio-temporal guidance, on in 2.3's pipelines: a block passes its values on, without attention."""

    def get_dummy_inputs(self, batch_size=1):
        return {**super().get_dummy_inputs(batch_size), "spatio_temporal_guidance_blocks": [1]}


class LTX23IsolatedTransformerTesterConfig(LTX23TransformerTesterConfig):
    """Guidance by modality, on in 2.3's pipelines: video and audio do not attend to each other."""

    without_effect = {
        "transformer_blocks.*.audio_to_video_attn.*": "not called",
        "transformer_blocks.*.video_to_audio_attn.*": "not called",
    }

    def get_dummy_inputs(self, batch_size=1):
        return {**super().get_dummy_inputs(batch_size), "isolate_modalities": True}


class LTX25TransformerTesterConfig(LTX23TransformerTesterConfig):
    """Some items of the batch guided, marked key frames, coordinates of the caller's own."""

    def get_init_dict(self):
        return {**super().get_init_dict(), "use_keyframes_abs_pos_embedding": True}

    def get_dummy_inputs(self, batch_size=1):
        starts = 4 * randn(batch_size, 3, 45, 1, seed=5).abs()
        audio_starts = 4 * randn(batch_size, 1, 13, 1, seed=6).abs()
        return {
            **super().get_dummy_inputs(batch_size),
            "spatio_temporal_guidance_blocks": [1],
            "perturbation_mask": torch.tensor([1.0, 0.0])[:batch_size],
            "audio_sigma": torch.tensor([400.0, 200.0])[:batch_size],
            "video_keyframes_mask": (torch.arange(45) % 4 == 0).float()[None, :, None].expand(batch_size, -1, -1),
            "video_coords": torch.cat([starts, starts + 1], -1),
            "audio_coords": torch.cat([audio_starts, audio_starts + 1], -1),
        }


class TestLTX2Transformer(LTX2TransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


HAS_LTX_2_3 = unittest.skipUnless(
    "gated_attn" in inspect.signature(LTX2VideoTransformer3DModel).parameters, "this diffusers has no LTX 2.3"
)


@HAS_LTX_2_3
class TestLTX23Transformer(LTX23TransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


@HAS_LTX_2_3
class TestLTX23GuidedTransformer(LTX23GuidedTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    breaks = "Data-dependent branching"  # whether a branch is perturbed

    without_effect = {
        "transformer_blocks.1.*attn1.to_q.*": "no attention in that block",
        "transformer_blocks.1.*attn1.to_k.*": "no attention in that block",
        "transformer_blocks.1.*attn1.norm_?.*": "no attention in that block",
    }


@HAS_LTX_2_3
class TestLTX23IsolatedTransformer(LTX23IsolatedTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


@unittest.skipUnless(
    "video_keyframes_mask" in inspect.signature(LTX2VideoTransformer3DModel.forward).parameters,
    "this diffusers has no LTX 2.5",
)
class TestLTX25Transformer(LTX25TransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    breaks = "Data-dependent branching"  # whether a branch is perturbed
