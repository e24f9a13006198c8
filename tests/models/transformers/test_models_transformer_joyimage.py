import unittest

import diffusers
import pytest
import torch

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


if not hasattr(diffusers, "JoyImageEditTransformer3DModel"):
    pytest.skip("this diffusers has no JoyImageEditTransformer3DModel", allow_module_level=True)


class JoyImageEditTransformerTesterConfig(BaseModelTesterConfig):
    """Two pictures and the image; the text has positions of its own."""

    model_class = diffusers.JoyImageEditTransformer3DModel
    rope_type = "mrope"
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
            "rope_type": self.rope_type,
        }

    def get_dummy_inputs(self, batch_size=1):
        return {
            "hidden_states": randn(batch_size, 3, 4, 1, 10, 2, seed=1),  # 3 x 5 tokens
            "encoder_hidden_states": randn(batch_size, 7, 24, seed=2),
            "timestep": torch.tensor([500.0, 250.0])[:batch_size],
        }


class JoyImageTransformerTesterConfig(JoyImageEditTransformerTesterConfig):
    """A video; the text has no positions."""

    rope_type = "rope"

    def get_dummy_inputs(self, batch_size=1):
        return {**super().get_dummy_inputs(batch_size), "hidden_states": randn(batch_size, 4, 3, 10, 2, seed=1)}


class TestJoyImageEditTransformer(JoyImageEditTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestJoyImageTransformer(JoyImageTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
