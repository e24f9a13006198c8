import unittest

import torch
from diffusers import OmniGenTransformer2DModel

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.plans import PlanTesterMixin


def _init_dict(**changed):
    return {
        "in_channels": 4,
        "patch_size": 2,
        "hidden_size": 40,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "intermediate_size": 72,
        "num_layers": 2,
        "vocab_size": 50,
        "pad_token_id": 0,
        "time_step_dim": 16,
        "pos_embed_max_size": 12,
        "rope_scaling": {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4},
        **changed,
    }


class OmniGenTransformerTesterConfig(BaseModelTesterConfig):
    """A picture among the words; words see what is before them, and not the padding."""

    model_class = OmniGenTransformer2DModel
    real_init_dict = {"rope_scaling": {"short_factor": [1.0] * 48, "long_factor": [1.0] * 48}}
    floating_inputs = ("hidden_states",)

    def get_init_dict(self):
        return _init_dict()

    def get_dummy_inputs(self, batch_size=1):
        words, tokens = 9, 25  # words and a picture of 3, the timestep, and an image of 15
        mask = torch.ones(tokens, tokens, dtype=torch.long).tril()
        mask[words + 1 :, words + 1 :] = 1
        mask = mask.repeat(batch_size, 1, 1)
        for item in range(batch_size):
            mask[item, :, : 1 + item] = 0
            mask[item, : 1 + item, : 1 + item] = 1  # a row must see something
        return {
            "hidden_states": randn(batch_size, 4, 10, 6, seed=1),
            "timestep": torch.tensor([0.7, 0.2])[:batch_size],
            "input_ids": torch.arange(words * batch_size).reshape(batch_size, words) * 7 % 50,
            "input_img_latents": [randn(1, 4, 2, 6, seed=2 + item) for item in range(batch_size)],
            "input_image_sizes": {item: [[3 + item, 6 + item]] for item in range(batch_size)},
            "attention_mask": mask,
            "position_ids": torch.arange(tokens).repeat(batch_size, 1),
        }


class TestOmniGenTransformer(OmniGenTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
