import unittest

import torch
from diffusers import QwenImageTransformer2DModel
from parameterized import parameterized

from ...testing_utils import run_ranks
from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.context_parallelism import ContextParallelTesterMixin, parity_worker
from ..testing_utils.parallelism import FLOAT32_BAR
from ..testing_utils.plans import PlanTesterMixin


class QwenImageTransformerTesterConfig(BaseModelTesterConfig):
    """With a mask: samples of a batch have prompts of different lengths."""

    model_class = QwenImageTransformer2DModel
    repeated_block_count = 1
    without_effect = {
        "transformer_blocks.1.attn.add_q_proj.*": "the text of the last block goes nowhere",
        "transformer_blocks.1.attn.to_add_out.*": "the text of the last block goes nowhere",
        "transformer_blocks.1.txt_mlp.*": "the text of the last block goes nowhere",
        "transformer_blocks.1.txt_mod.1.*": "the second half is for what comes after the attention",
    }

    def get_init_dict(self):
        return {
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 5,
            "joint_attention_dim": 32,
            "axes_dims_rope": (4, 6, 6),
        }

    def get_dummy_inputs(self, batch_size=1):
        text = 11
        mask = torch.ones(batch_size, text, dtype=torch.long)
        mask[0, 3:] = 0  # the second of two ranks has padding alone
        return {
            "hidden_states": randn(batch_size, 35, 16, seed=1),
            "encoder_hidden_states": randn(batch_size, text, 32, seed=2),
            "encoder_hidden_states_mask": mask,
            "timestep": torch.tensor([0.5, 0.25])[:batch_size],
            "img_shapes": [[(1, 5, 7)]] * batch_size,
        }


class QwenImageEditTransformerTesterConfig(QwenImageTransformerTesterConfig):
    """Qwen-Image-Edit 2511: a reference picture in the same sequence, modulated as if it were clean."""

    def get_init_dict(self):
        return {**super().get_init_dict(), "zero_cond_t": True}

    def get_dummy_inputs(self, batch_size=1):
        inputs = super().get_dummy_inputs(batch_size)
        inputs["hidden_states"] = randn(batch_size, 35 + 12, 16, seed=1)
        inputs["img_shapes"] = [[(1, 5, 7), (1, 3, 4)]] * batch_size
        return inputs


class QwenImageControlNetTransformerTesterConfig(QwenImageTransformerTesterConfig):
    """With the residuals of a ControlNet, which every rank is given whole."""

    def get_dummy_inputs(self, batch_size=1):
        residuals = [randn(batch_size, 35, 80, seed=seed) for seed in (3, 4)]
        return {**super().get_dummy_inputs(batch_size), "controlnet_block_samples": residuals}


class QwenImageLayeredTransformerTesterConfig(QwenImageTransformerTesterConfig):
    """Qwen-Image-Layered: layers and the picture that they are made of, and a flag beside the timestep."""

    def get_init_dict(self):
        return {**super().get_init_dict(), "use_layer3d_rope": True, "use_additional_t_cond": True}

    def get_dummy_inputs(self, batch_size=1):
        return {
            **super().get_dummy_inputs(batch_size),
            "hidden_states": randn(batch_size, 3 * 15 + 12, 16, seed=1),
            "img_shapes": [[(1, 3, 5), (1, 3, 5), (1, 3, 5), (1, 3, 4)]] * batch_size,
            "additional_t_cond": torch.tensor([0, 1])[:batch_size],
        }


class TestQwenImageTransformer(QwenImageTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    def test_graphs_here(self):
        """Hooks split inputs of the first block, and of each."""
        self.check_graphs("Ulysses 2")


class TestQwenImageEditTransformer(QwenImageEditTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestQwenImageLayeredTransformer(QwenImageLayeredTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestQwenImageTransformerContextParallel(
    QwenImageTransformerTesterConfig, ContextParallelTesterMixin, unittest.TestCase
):
    pass


class TestQwenImageEditTransformerContextParallel(
    QwenImageEditTransformerTesterConfig, ContextParallelTesterMixin, unittest.TestCase
):
    pass


class TestQwenImageControlNetTransformer(
    QwenImageControlNetTransformerTesterConfig, PlanTesterMixin, unittest.TestCase
):
    pass


class TestQwenImageControlNetResiduals(unittest.TestCase):
    @parameterized.expand([((3, 1, "p2p"),), ((1, 2, "p2p"),)])
    def test_parity(self, split):
        config = QwenImageControlNetTransformerTesterConfig()
        for result in run_ranks(split[0] * split[1], parity_worker, config, split, 2):
            assert result["error"] <= FLOAT32_BAR and result["output_restored"], result
