import unittest

import torch
from diffusers import CogView4Transformer2DModel
from parameterized import parameterized

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


class CogView4TransformerTesterConfig(BaseModelTesterConfig):
    """Joint attention, one feed-forward for both streams."""

    model_class = CogView4Transformer2DModel

    def get_init_dict(self):
        return {
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 5,
            "text_embed_dim": 18,
            "time_embed_dim": 24,
            "condition_dim": 6,
            "pos_embed_max_size": 10,
            "sample_size": 10,
            "rope_axes_dim": (16, 16),
        }

    def get_dummy_inputs(self, batch_size=1):
        return {
            "hidden_states": randn(batch_size, 4, 10, 6, seed=1),  # 15 tokens
            "encoder_hidden_states": randn(batch_size, 11, 18, seed=2),
            "timestep": torch.tensor([500.0, 250.0])[:batch_size],
            "original_size": torch.tensor([[80.0, 48.0], [96.0, 64.0]])[:batch_size],
            "target_size": torch.tensor([[80.0, 48.0], [80.0, 48.0]])[:batch_size],
            "crop_coords": torch.tensor([[0.0, 0.0], [4.0, 8.0]])[:batch_size],
        }


class CogView4MaskedTransformerTesterConfig(CogView4TransformerTesterConfig):
    """Padded text: a mask of queries by keys, which the processor makes of what a rank has."""

    cannot = dict.fromkeys(("Ulysses 2", "ring 2", "TP 2 x Ulysses 2"), "cannot go with attention_mask")

    def get_dummy_inputs(self, batch_size=1):
        mask = (torch.arange(11)[None] < torch.tensor([[5], [11]])[:batch_size]).long()
        return {**super().get_dummy_inputs(batch_size), "attention_mask": mask}


class TestCogView4Transformer(CogView4TransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    @parameterized.expand([("TP 2",), ("Ulysses 2",)])
    def test_compiled_here(self, name):
        """Of those whose processors call torch's attention, and whose class names no blocks."""
        self.check_compiled(name)


class TestCogView4MaskedTransformer(CogView4MaskedTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
