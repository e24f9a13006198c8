import unittest

import diffusers
import pytest
import torch

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


if not hasattr(diffusers, "Cosmos3OmniTransformer"):
    pytest.skip("this diffusers has no Cosmos3OmniTransformer", allow_module_level=True)


class Cosmos3OmniTransformerTesterConfig(BaseModelTesterConfig):
    """Videos of which the first frame is given; two query heads for each key head."""

    model_class = diffusers.Cosmos3OmniTransformer
    without_effect = {
        "lm_head.weight": "the model writes no text",
        "layers.1.self_attn.to_q.*": "the text of the last layer goes nowhere",
        "layers.1.self_attn.to_out.*": "the text of the last layer goes nowhere",
        "layers.1.mlp.*": "the text of the last layer goes nowhere",
    }

    def get_init_dict(self):
        return {
            "head_dim": 8,
            "hidden_size": 48,
            "intermediate_size": 72,
            "latent_channel": 4,
            "latent_patch_size": 2,
            "patch_latent_dim": 16,
            "num_attention_heads": 10,
            "num_key_value_heads": 5,
            "num_hidden_layers": 2,
            "vocab_size": 50,
            "rope_axes_dim": [2, 1, 1],
        }

    def get_dummy_inputs(self, batch_size=1):
        words, of_video = 7, 9  # 3 frames of 3 tokens
        tokens = words + of_video * batch_size
        noisy = torch.cat([words + of_video * item + torch.arange(3, of_video) for item in range(batch_size)])
        return {
            "input_ids": torch.arange(words) * 7,
            "text_indexes": torch.arange(words),
            "position_ids": torch.arange(tokens).repeat(3, 1) % torch.tensor([[50], [6], [5]]),
            "und_len": words,
            "sequence_length": tokens,
            "vision_tokens": [randn(1, 4, 3, 6, 2, seed=item) for item in range(batch_size)],
            "vision_token_shapes": [(3, 3, 1)] * batch_size,
            "vision_sequence_indexes": torch.arange(words, tokens),
            "vision_mse_loss_indexes": noisy,
            "vision_timesteps": torch.linspace(200, 700, len(noisy)),
            "vision_noisy_frame_indexes": [torch.tensor([1, 2])] * batch_size,
        }


class Cosmos3NemotronTransformerTesterConfig(Cosmos3OmniTransformerTesterConfig):
    """Of Nemotron: squared ReLU, no norms of the text's q and k, but of its keys that the rest sees; and sound."""

    def get_init_dict(self):
        return {
            **super().get_init_dict(),
            "attention_bias": True,
            "hidden_act": "relu2",
            "qk_norm_for_text": False,
            "use_und_k_norm_for_gen": True,
            "sound_gen": True,
            "sound_dim": 6,
        }

    def get_dummy_inputs(self, batch_size=1):
        inputs = super().get_dummy_inputs(batch_size)
        start, sound = inputs["sequence_length"], 4
        indexes = torch.arange(start, start + sound)
        return {
            **inputs,
            "position_ids": torch.arange(start + sound).repeat(3, 1) % torch.tensor([[50], [6], [5]]),
            "sequence_length": start + sound,
            "sound_tokens": [randn(6, sound, seed=9)],
            "sound_token_shapes": [(sound, 1, 1)],
            "sound_sequence_indexes": indexes,
            "sound_mse_loss_indexes": indexes,
            "sound_timesteps": torch.linspace(300, 600, sound),
            "sound_noisy_frame_indexes": [torch.arange(sound)],
        }


class Cosmos3ActionTransformerTesterConfig(Cosmos3OmniTransformerTesterConfig):
    """A robot's actions beside the video, of which some are given."""

    def get_init_dict(self):
        return {**super().get_init_dict(), "action_gen": True, "action_dim": 5, "num_embodiment_domains": 3}

    def get_dummy_inputs(self, batch_size=1):
        inputs = super().get_dummy_inputs(batch_size)
        start, actions = inputs["sequence_length"], 6
        indexes = torch.arange(start, start + actions)
        return {
            **inputs,
            "position_ids": torch.arange(start + actions).repeat(3, 1) % torch.tensor([[50], [6], [5]]),
            "sequence_length": start + actions,
            "action_tokens": [randn(actions, 5, seed=9)],
            "action_token_shapes": [(actions, 1, 1)],
            "action_sequence_indexes": indexes,
            "action_mse_loss_indexes": indexes[2:],
            "action_timesteps": torch.linspace(300, 600, actions - 2),
            "action_noisy_frame_indexes": [torch.arange(2, actions)],
            "action_domain_ids": [torch.tensor([2])],
        }


class TestCosmos3OmniTransformer(Cosmos3OmniTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestCosmos3NemotronTransformer(Cosmos3NemotronTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestCosmos3ActionTransformer(Cosmos3ActionTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
