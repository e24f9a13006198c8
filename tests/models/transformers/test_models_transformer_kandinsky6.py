import unittest

import diffusers
import pytest
import torch

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


if not hasattr(diffusers, "Kandinsky6Transformer3DModel"):
    pytest.skip("this diffusers has no Kandinsky 6", allow_module_level=True)


class Kandinsky6TransformerTesterConfig(BaseModelTesterConfig):
    """As its checkpoints: video and audio that attend to each other, a mask of the text; narrower audio."""

    model_class = diffusers.Kandinsky6Transformer3DModel

    def get_init_dict(self):
        return {
            "in_visual_dim": 4,
            "out_visual_dim": 4,
            "in_text_dim": 16,
            "in_text_dim2": 12,
            "time_dim": 14,
            "model_dim": 60,
            "ff_dim": 72,
            "num_text_blocks": 2,
            "num_visual_blocks": 2,
            "axes_dims": (4, 4, 4),
            "in_audio_dim": 20,
            "out_audio_dim": 20,
            "model_dim_a": 50,
            "time_dim_a": 14,
            "ff_dim_a": 40,
            "axes_dims_a": (2, 4, 4),
            "text_token_padding": True,
            "cross_gates": True,
            "fix_modulation": True,
            "visual_token_type_num_embeddings": 2,
        }

    def get_dummy_inputs(self, batch_size=1):
        mask = torch.ones(batch_size, 11, dtype=torch.bool)
        mask[0, 4:] = False
        return {
            "hidden_states": randn(batch_size, 3, 6, 10, 9, seed=1),  # 45 tokens
            "encoder_hidden_states": randn(batch_size, 11, 16, seed=2),
            "pooled_projections": randn(batch_size, 12, seed=3),
            "audio_hidden_states": randn(batch_size, 21, 20, seed=4),
            "encoder_attention_mask": mask,
            "visual_token_type_ids": torch.tensor([[1, 0, 0]]).expand(batch_size, -1),
            "timestep": torch.tensor([500.0, 250.0])[:batch_size],
        }


class TestKandinsky6Transformer(Kandinsky6TransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class Kandinsky6RotaryTransformerTesterConfig(Kandinsky6TransformerTesterConfig):
    """Rotary embeddings between video and audio, whose heads are of one size then; the other modulation."""

    def get_init_dict(self):
        return {
            **super().get_init_dict(),
            "model_dim_a": None,
            "axes_dims_a": None,
            "time_dim_a": None,
            "ff_dim_a": None,
            "ca_rope": True,
            "cross_gates": False,
            "fix_modulation": False,
        }


class TestKandinsky6RotaryTransformer(Kandinsky6RotaryTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class Kandinsky6VideoTransformerTesterConfig(Kandinsky6TransformerTesterConfig):
    """No audio, and positions of the caller's own."""

    without_effect = {
        "*audio*": "there is no audio",
        "visual_transformer_blocks.*.va_*": "there is no audio",
        "visual_transformer_blocks.*.av_*": "there is no audio",
    }

    def get_dummy_inputs(self, batch_size=1):
        inputs = super().get_dummy_inputs(batch_size)
        del inputs["audio_hidden_states"]
        return {**inputs, "visual_rope_pos": tuple(torch.arange(size) + 2 for size in (3, 3, 5))}


class TestKandinsky6VideoTransformer(Kandinsky6VideoTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
