import unittest

import torch
from diffusers import AuraFlowTransformer2DModel

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


class AuraFlowTransformerTesterConfig(BaseModelTesterConfig):
    """Two blocks of each kind. The model adds eight tokens of its own to the text."""

    model_class = AuraFlowTransformer2DModel

    def get_init_dict(self):
        return {
            "sample_size": 10,
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_mmdit_layers": 2,
            "num_single_dit_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 5,
            "joint_attention_dim": 18,
            "caption_projection_dim": 40,
            "pos_embed_max_size": 36,
        }

    def get_dummy_inputs(self, batch_size=1):
        return {
            "hidden_states": randn(batch_size, 4, 10, 6, seed=1),  # 15 tokens
            "encoder_hidden_states": randn(batch_size, 11, 18, seed=2),
            "timestep": torch.tensor([0.5, 0.25])[:batch_size],
        }


class TestAuraFlowTransformer(AuraFlowTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
