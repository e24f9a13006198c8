import unittest

import diffusers
import pytest
import torch

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


if not hasattr(diffusers, "Ideogram4Transformer2DModel"):
    pytest.skip("this diffusers has no Ideogram4Transformer2DModel", allow_module_level=True)


class Ideogram4TransformerTesterConfig(BaseModelTesterConfig):
    """Padding, 8 words and 15 tokens of an image; the second item is two segments."""

    model_class = diffusers.Ideogram4Transformer2DModel

    def get_init_dict(self):
        return {
            "in_channels": 8,
            "num_layers": 2,
            "attention_head_dim": 12,
            "num_attention_heads": 5,
            "intermediate_size": 72,
            "adaln_dim": 16,
            "llm_features_dim": 24,
            "mrope_section": (2, 2, 2),
        }

    def get_dummy_inputs(self, batch_size=1):
        tokens, image = 25, 65536 + torch.cartesian_prod(torch.arange(1), torch.arange(5), torch.arange(3))
        words = torch.arange(10)[:, None].expand(-1, 3)
        indicator = torch.tensor([-1] * 2 + [3] * 8 + [2] * 15)
        segments = torch.tensor([[-1] * 2 + [1] * 23, [-1] * 2 + [1] * 12 + [2] * 11])
        return {
            "hidden_states": randn(batch_size, tokens, 8, seed=1),
            "encoder_hidden_states": randn(batch_size, tokens, 24, seed=2),
            "timestep": torch.tensor([0.7, 0.2])[:batch_size],
            "position_ids": torch.cat([words, image]).repeat(batch_size, 1, 1),
            "segment_ids": segments[:batch_size],
            "indicator": indicator.repeat(batch_size, 1),
        }


class Ideogram4TimesTransformerTesterConfig(Ideogram4TransformerTesterConfig):
    """A timestep for each token."""

    def get_dummy_inputs(self, batch_size=1):
        times = torch.linspace(0.1, 0.9, 25 * batch_size).reshape(batch_size, 25)
        return {**super().get_dummy_inputs(batch_size), "timestep": times}


class TestIdeogram4Transformer(Ideogram4TransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestIdeogram4TimesTransformer(Ideogram4TimesTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
