import unittest
from unittest import mock

import diffusers
import pytest
import torch

from diffusers_rocm import ParallelConfig

from ...testing_utils import message_of, run_ranks
from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


if not hasattr(diffusers, "AceStepTransformer1DModel"):
    pytest.skip("this diffusers has no ACE-Step", allow_module_level=True)


class AceStepTransformerTesterConfig(BaseModelTesterConfig):
    """A layer with a sliding window, which reaches over the ranks, and one without."""

    model_class = diffusers.AceStepTransformer1DModel

    def get_init_dict(self):
        return {
            "hidden_size": 40,
            "intermediate_size": 52,
            "num_hidden_layers": 2,
            "num_attention_heads": 10,
            "num_key_value_heads": 5,
            "head_dim": 8,
            "in_channels": 12,
            "audio_acoustic_hidden_dim": 4,
            "sliding_window": 4,
            "encoder_hidden_size": 18,
        }

    def get_dummy_inputs(self, batch_size=1):
        return {
            "hidden_states": randn(batch_size, 29, 4, seed=1),  # 15 tokens
            "context_latents": randn(batch_size, 29, 8, seed=2),
            "encoder_hidden_states": randn(batch_size, 11, 18, seed=3),
            "timestep": torch.tensor([0.5, 0.25])[:batch_size],
            "timestep_r": torch.tensor([0.3, 0.2])[:batch_size],
        }


def flash_worker() -> str:
    config = AceStepTransformerTesterConfig()
    model = config.get_model()
    model.enable_parallelism(config=ParallelConfig(ulysses=2))
    module = diffusers.models.transformers.ace_step_transformer
    with mock.patch.object(module, "_is_flash_attention_backend", lambda processor: True):
        return message_of(config.get_output, model, config.get_inputs())


class TestAceStepTransformer(AceStepTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    def test_a_window_without_a_mask_is_refused(self):
        """The model leaves the window to flash backends, which would see a rank's tokens only."""
        for message in run_ranks(2, flash_worker):
            assert "sliding window" in message, message
