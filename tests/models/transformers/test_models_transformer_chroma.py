import unittest

import torch
from diffusers import ChromaTransformer2DModel
from parameterized import parameterized

from diffusers_rocm import ParallelConfig

from ...testing_utils import relative_l2, run_ranks
from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.parallelism import FLOAT32_BAR
from ..testing_utils.plans import PlanTesterMixin
from .test_ip_adapters_flux import ip_adapter_state_dict


class ChromaTransformerTesterConfig(BaseModelTesterConfig):
    """With a mask of the joined sequence, and the residuals of ControlNets."""

    model_class = ChromaTransformer2DModel

    def get_init_dict(self):
        return {
            "in_channels": 16,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 5,
            "joint_attention_dim": 32,
            "axes_dims_rope": (4, 2, 2),
            "approximator_num_channels": 16,
            "approximator_hidden_dim": 24,
            "approximator_layers": 2,
        }

    def get_dummy_inputs(self, batch_size=1):
        height, width, text = 5, 7, 11
        image_ids = torch.zeros(height, width, 3)
        image_ids[..., 1] += torch.arange(height)[:, None]
        image_ids[..., 2] += torch.arange(width)[None]
        mask = torch.ones(batch_size, text + height * width, dtype=torch.bool)
        mask[0, 4:text] = False  # the second of two ranks has padding alone
        mask[1:, 9:text] = False
        return {
            "hidden_states": randn(batch_size, height * width, 16, seed=1),
            "encoder_hidden_states": randn(batch_size, text, 32, seed=2),
            "timestep": torch.tensor([0.5, 0.25])[:batch_size],
            "img_ids": image_ids.reshape(-1, 3),
            "txt_ids": torch.zeros(text, 3),
            "attention_mask": mask,
            "controlnet_block_samples": [randn(batch_size, height * width, 40, seed=seed) for seed in (3, 4)],
            "controlnet_single_block_samples": [randn(batch_size, height * width, 40, seed=5)],
        }


class TestChromaTransformer(ChromaTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


@torch.no_grad()
def ip_adapter_worker(degrees: dict[str, int]) -> tuple[float, float]:
    """Error with an IP-Adapter, which is FLUX.1's, and what it changes at all."""
    config = ChromaTransformerTesterConfig()
    model, inputs = config.get_model(), config.get_inputs(2)
    plain = config.get_output(model, inputs)
    model._load_ip_adapter_weights([ip_adapter_state_dict(model, 10)])
    for block in model.transformer_blocks:
        block.attn.processor.scale = [0.7]

    def output() -> torch.Tensor:
        prompt = {"ip_adapter_image_embeds": [randn(2, 1, 10, seed=30)]}
        return config.get_output(model, {**inputs, "joint_attention_kwargs": prompt})

    reference = output()
    model.enable_parallelism(config=ParallelConfig(**degrees))
    return relative_l2(output(), reference), relative_l2(plain, reference)


class TestChromaIPAdapter(unittest.TestCase):
    @parameterized.expand([("TP", {"tp": 2}), ("ring", {"ring": 2})])
    def test_parity(self, name, degrees):
        for error, effect in run_ranks(2, ip_adapter_worker, degrees):
            assert error <= FLOAT32_BAR and effect > 1e-3, (error, effect)
