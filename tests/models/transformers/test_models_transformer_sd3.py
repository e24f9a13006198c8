import unittest

import torch
from diffusers import SD3Transformer2DModel
from diffusers.models.attention_processor import JointAttnProcessor2_0, SD3IPAdapterJointAttnProcessor2_0

import diffusers_rocm

from ...testing_utils import message_of
from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.context_parallelism import ContextParallelTesterMixin
from ..testing_utils.plans import PlanTesterMixin


class SD3TransformerTesterConfig(BaseModelTesterConfig):
    """Of 3.5: attention to the image alone in the first block, norms of q and k."""

    model_class = SD3Transformer2DModel
    repeated_block_count = 0
    without_effect = {
        "transformer_blocks.1.attn.add_q_proj.*": "the text of the last block goes nowhere",
    }

    def get_init_dict(self):
        return {
            "sample_size": 10,
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 5,
            "joint_attention_dim": 32,
            "caption_projection_dim": 40,
            "pooled_projection_dim": 24,
            "dual_attention_layers": (0,),
            "qk_norm": "rms_norm",
        }

    def get_dummy_inputs(self, batch_size=1):
        return {
            "hidden_states": randn(batch_size, 4, 10, 6, seed=1),  # 15 tokens
            "encoder_hidden_states": randn(batch_size, 11, 32, seed=2),
            "pooled_projections": randn(batch_size, 24, seed=3),
            "timestep": torch.tensor([500.0, 250.0])[:batch_size],
            "block_controlnet_hidden_states": [randn(batch_size, 15, 40, seed=4)],
        }


class SD3SkippedLayerTransformerTesterConfig(SD3TransformerTesterConfig):
    """What skip-layer guidance subtracts: a forward that leaves a block out."""

    without_effect = {
        "transformer_blocks.1.*": "left out",
        "transformer_blocks.2.attn.add_q_proj.*": "the text of the last block goes nowhere",
    }

    def get_init_dict(self):
        return {**super().get_init_dict(), "num_layers": 3}

    def get_dummy_inputs(self, batch_size=1):
        return {**super().get_dummy_inputs(batch_size), "skip_layers": [1]}


class SD3IPAdapterTransformerTesterConfig(SD3TransformerTesterConfig):
    """The prompt's image has keys and values of its own, in the processors."""

    cannot = dict.fromkeys(("Ulysses 2", "ring 2", "TP 2 x Ulysses 2"), "the image attends to itself and to the")

    def get_model(self, seed=0, dtype=torch.float32):
        model = super().get_model(seed, dtype)
        for index, block in enumerate(model.transformer_blocks):
            processor = SD3IPAdapterJointAttnProcessor2_0(40, 12, 8, timesteps_emb_dim=16)
            generator = torch.Generator().manual_seed(index)
            with torch.no_grad():
                for parameter in processor.parameters():
                    parameter.normal_(0.1, 0.3, generator=generator)
            block.attn.set_processor(processor.to(dtype))
        return model

    def get_dummy_inputs(self, batch_size=1):
        prompted = {"ip_hidden_states": randn(batch_size, 9, 12, seed=5), "temb": randn(batch_size, 16, seed=6)}
        return {**super().get_dummy_inputs(batch_size), "joint_attention_kwargs": prompted}


class OwnLayers(torch.nn.Module, JointAttnProcessor2_0):
    def __init__(self):
        super().__init__()
        self.to_k_of_mine = torch.nn.Linear(40, 40)


class TestSD3Processors(unittest.TestCase):
    def test_layers_of_a_processor_without_a_rule(self):
        model = SD3TransformerTesterConfig().get_model()
        model.transformer_blocks[1].attn.set_processor(OwnLayers())
        message = message_of(diffusers_rocm.verify_plan, model, 2)
        assert "no rule for transformer_blocks.1.attn.processor.to_k_of_mine, of a OwnLayers" in message


class TestSD3SkippedLayerTransformer(SD3SkippedLayerTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestSD3IPAdapterTransformer(SD3IPAdapterTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    breaks = "logging.Logger method"  # a warning in each block


class TestSD3Transformer(SD3TransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestSD3TransformerContextParallel(SD3TransformerTesterConfig, ContextParallelTesterMixin, unittest.TestCase):
    """Its processor calls torch's attention itself."""
