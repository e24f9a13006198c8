import unittest
from unittest import mock

import diffusers
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from ..testing_utils.common import BaseModelTesterConfig, flatten_output, randn
from ..testing_utils.plans import PlanTesterMixin


if not hasattr(diffusers, "WanAnimate2Transformer3DModel"):
    pytest.skip("this diffusers has no Wan Animate 2", allow_module_level=True)

MODULE = diffusers.models.transformers.transformer_wan_animate_2


class WanAnimate2TransformerTesterConfig(BaseModelTesterConfig):
    """The pass over two reference frames, and one over three frames that attend to them."""

    model_class = diffusers.WanAnimate2Transformer3DModel

    def get_init_dict(self):
        return {
            "text_len": 11,
            "in_dim": 8,
            "dim": 60,
            "ffn_dim": 52,
            "freq_dim": 32,
            "text_dim": 16,
            "out_dim": 4,
            "num_heads": 5,
            "num_layers": 2,
        }

    def get_dummy_inputs(self, batch_size=1):
        def videos(frames: int, seed: int) -> list[torch.Tensor]:
            return list(randn(batch_size, 4, frames, 6, 10, seed=seed))

        grid = torch.tensor([[2, 3, 5]] * batch_size)
        common = {
            "timestep": torch.tensor([500.0, 250.0])[:batch_size],
            "encoder_hidden_states": [randn(9 - item, 16, seed=5 + item) for item in range(batch_size)],
            "encoder_hidden_states_image": randn(batch_size, 7, 1280, seed=7),
        }
        return {
            "extract": {
                **common,
                "hidden_states": videos(2, 1),
                "condition_latents": videos(2, 2),
                "seq_len": 30,
                "offset_grid_sizes": grid,
            },
            "cached": {
                **common,
                "hidden_states": videos(3, 3),
                "condition_latents": videos(3, 4),
                "seq_len": 45,
                "reference_grid_sizes": grid,
                "origin_len": 5,
                "origin_area": [48, 80],
            },
        }

    def get_output(self, model, inputs):
        def uncompiled(*args, _compile, **kwargs):
            return create_block_mask(*args, **kwargs)

        cache = MODULE.WanAnimate2KVCache(len(model.blocks))
        with mock.patch.object(MODULE, "create_block_mask", uncompiled):
            outputs = [
                model(**each, kv_cache=cache, kv_cache_mode=mode, return_dict=False) for mode, each in inputs.items()
            ]
        return flatten_output(outputs)


class TestWanAnimate2Transformer(WanAnimate2TransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    breaks = "data-dependent"  # how many frames there are

    cannot = dict.fromkeys(("Ulysses 2", "ring 2", "TP 2 x Ulysses 2"), "whole frames of a video")
