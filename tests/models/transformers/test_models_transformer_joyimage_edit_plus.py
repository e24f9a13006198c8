import unittest

import diffusers
import pytest
import torch

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


if not hasattr(diffusers, "JoyImageEditPlusTransformer3DModel"):
    pytest.skip("this diffusers has no JoyImageEditPlusTransformer3DModel", allow_module_level=True)


class JoyImageEditPlusTransformerTesterConfig(BaseModelTesterConfig):
    """An image and a picture of another size; both sequences are padded."""

    model_class = diffusers.JoyImageEditPlusTransformer3DModel
    without_effect = {
        "double_blocks.1.attn.txt_attn_proj.*": "the text of the last block goes nowhere",
        "double_blocks.1.txt_mlp.*": "the text of the last block goes nowhere",
    }

    def get_init_dict(self):
        return {
            "patch_size": [1, 2, 2],
            "in_channels": 4,
            "hidden_size": 40,
            "num_attention_heads": 5,
            "text_dim": 24,
            "mlp_width_ratio": 1.8,
            "num_layers": 2,
            "rope_dim_list": [4, 2, 2],
        }

    def get_dummy_inputs(self, batch_size=1):
        return {
            "hidden_states": randn(batch_size, 17, 4, 1, 2, 2, seed=1),
            "encoder_hidden_states": randn(batch_size, 7, 24, seed=2),
            "encoder_hidden_states_mask": torch.arange(7)[None] < torch.tensor([[5], [7]])[:batch_size],
            "shape_list": [[(1, 3, 3), (1, 2, 3)], [(1, 5, 3), (1, 1, 2)]][:batch_size],
            "timestep": torch.tensor([500.0, 250.0])[:batch_size],
        }


class TestJoyImageEditPlusTransformer(JoyImageEditPlusTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
