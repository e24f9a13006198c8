import unittest
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F
from diffusers import CosmosTransformer3DModel
from diffusers.models.transformers import transformer_cosmos

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


def _resize(mask: torch.Tensor, size: list[int], interpolation: str) -> torch.Tensor:
    return F.interpolate(mask, size=size, mode=interpolation)


def torchvision_in(module: ModuleType):
    """All that a forward takes of torchvision, which need not be there: for a mask, before anything is split."""
    resize, nearest = SimpleNamespace(resize=_resize), SimpleNamespace(NEAREST="nearest")
    transforms = SimpleNamespace(functional=resize, InterpolationMode=nearest)
    return mock.patch.object(module, "transforms", transforms, create=True)


class CosmosTransformerTesterConfig(BaseModelTesterConfig):
    """1.0: learned positions beside the rotary ones, one timestep a video, a mask of the text."""

    model_class = CosmosTransformer3DModel

    def get_init_dict(self):
        return {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 5,
            "attention_head_dim": 18,
            "num_layers": 2,
            "mlp_ratio": 2,
            "text_embed_dim": 16,
            "adaln_lora_dim": 6,
            "max_size": (4, 16, 16),
            "patch_size": (1, 2, 2),
            "concat_padding_mask": False,
            "extra_pos_embed_type": "learnable",
        }

    def get_dummy_inputs(self, batch_size=1):
        mask = torch.ones(batch_size, 11, dtype=torch.bool)
        mask[0, 4:] = False
        return {
            "hidden_states": randn(batch_size, 4, 3, 6, 10, seed=1),  # 45 tokens
            "encoder_hidden_states": randn(batch_size, 11, 16, seed=2),
            "attention_mask": mask,
            "timestep": torch.tensor([500.0, 250.0])[:batch_size],
            "fps": 30,
        }


class Cosmos2_5TransformerTesterConfig(CosmosTransformerTesterConfig):
    """2.5: masks as channels, a timestep for each frame, an image beside the text, residuals of a ControlNet."""

    def get_init_dict(self):
        return {
            **super().get_init_dict(),
            "in_channels": 5,
            "concat_padding_mask": True,
            "extra_pos_embed_type": None,
            "use_crossattn_projection": True,
            "crossattn_proj_in_channels": 24,
            "encoder_hidden_states_channels": 16,
            "controlnet_block_every_n": 1,
            "img_context_dim_in": 12,
            "img_context_num_tokens": 5,
            "img_context_dim_out": 90,
        }

    def get_dummy_inputs(self, batch_size=1):
        timestep = torch.tensor([[0.0, 500.0, 500.0], [0.0, 250.0, 250.0]])
        inputs = super().get_dummy_inputs(batch_size)
        del inputs["attention_mask"]
        return {
            **inputs,
            "encoder_hidden_states": (randn(batch_size, 11, 24, seed=2), randn(batch_size, 5, 12, seed=3)),
            "timestep": timestep[:batch_size, None, :, None, None],
            "condition_mask": randn(batch_size, 1, 3, 6, 10, seed=6),
            "padding_mask": randn(1, 1, 12, 20, seed=7),
            "block_controlnet_hidden_states": [randn(batch_size, 45, 90, seed=4), randn(batch_size, 45, 90, seed=5)],
        }

    def get_output(self, model, inputs):
        with torchvision_in(transformer_cosmos):
            return super().get_output(model, inputs)


class TestCosmosTransformer(CosmosTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestCosmos2_5Transformer(Cosmos2_5TransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
