import unittest

import diffusers
import pytest
import torch

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


if not hasattr(diffusers, "Krea2Transformer2DModel"):
    pytest.skip("this diffusers has no Krea2Transformer2DModel", allow_module_level=True)


class Krea2TransformerTesterConfig(BaseModelTesterConfig):
    """Two query heads for each key head, padded text."""

    model_class = diffusers.Krea2Transformer2DModel

    def get_init_dict(self):
        return {
            "in_channels": 8,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 10,
            "num_key_value_heads": 5,
            "intermediate_size": 72,
            "timestep_embed_dim": 16,
            "text_hidden_dim": 40,
            "num_text_layers": 3,
            "text_num_attention_heads": 10,
            "text_num_key_value_heads": 5,
            "text_intermediate_size": 56,
            "num_layerwise_text_blocks": 1,
            "num_refiner_text_blocks": 2,
            "axes_dims_rope": (4, 2, 2),
        }

    def get_dummy_inputs(self, batch_size=1):
        words, rows, columns = 8, 5, 3  # 23 tokens
        grid = torch.cartesian_prod(torch.arange(1), torch.arange(rows), torch.arange(columns))
        return {
            "hidden_states": randn(batch_size, rows * columns, 8, seed=1),
            "encoder_hidden_states": randn(batch_size, words, 3, 40, seed=2),
            "timestep": torch.tensor([0.7, 0.2])[:batch_size],
            "position_ids": torch.cat([torch.zeros(words, 3), grid]),
            "encoder_attention_mask": torch.arange(words)[None] < torch.tensor([[6], [3]])[:batch_size],
        }


class TestKrea2Transformer(Krea2TransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
