import unittest

import torch
from diffusers import CosmosControlNetModel
from diffusers.models.controlnets import controlnet_cosmos
from parameterized import parameterized

from diffusers_rocm import ParallelConfig

from ...testing_utils import relative_l2, run_ranks
from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.parallelism import FLOAT32_BAR
from ..testing_utils.plans import PlanTesterMixin
from ..transformers.test_models_transformer_cosmos import Cosmos2_5TransformerTesterConfig, torchvision_in


class CosmosControlNetTesterConfig(BaseModelTesterConfig):
    """Transfer 2.5: a timestep for each frame, an image beside the text."""

    model_class = CosmosControlNetModel
    # The default number of heads is not that of its default width.
    real_init_dict = {
        "num_attention_heads": 16,
        "img_context_dim_in": 1152,
        "use_crossattn_projection": True,
        "crossattn_proj_in_channels": 100352,
    }

    def get_init_dict(self):
        return {
            "n_controlnet_blocks": 2,
            "in_channels": 8,
            "latent_channels": 6,
            "model_channels": 90,
            "num_attention_heads": 5,
            "attention_head_dim": 18,
            "mlp_ratio": 2,
            "text_embed_dim": 16,
            "adaln_lora_dim": 6,
            "max_size": (4, 16, 16),
            "patch_size": (1, 2, 2),
            "use_crossattn_projection": True,
            "crossattn_proj_in_channels": 24,
            "encoder_hidden_states_channels": 16,
            "img_context_dim_in": 12,
            "img_context_dim_out": 90,
        }

    def get_dummy_inputs(self, batch_size=1):
        inputs = Cosmos2_5TransformerTesterConfig().get_dummy_inputs(batch_size)
        del inputs["block_controlnet_hidden_states"]
        latents = inputs.pop("hidden_states")
        return {
            **inputs,
            "latents": latents,
            "controls_latents": randn(batch_size, 4, 3, 6, 10, seed=8),
            "conditioning_scale": [0.7, 1.3],
        }

    def get_output(self, model, inputs):
        with torchvision_in(controlnet_cosmos):
            return super().get_output(model, inputs)


class CosmosControlNetMaskTesterConfig(CosmosControlNetTesterConfig):
    """Learned positions beside the rotary ones, one timestep a video, a mask of the text, and no condition's mask."""

    def get_init_dict(self):
        return {
            **super().get_init_dict(),
            "latent_channels": 5,
            "extra_pos_embed_type": "learnable",
            "use_crossattn_projection": False,
            "img_context_dim_in": None,
        }

    def get_dummy_inputs(self, batch_size=1):
        mask = torch.ones(batch_size, 11, dtype=torch.bool)
        mask[0, 4:] = False
        return {
            **super().get_dummy_inputs(batch_size),
            "encoder_hidden_states": randn(batch_size, 11, 16, seed=2),
            "attention_mask": mask,
            "timestep": torch.tensor([500.0, 250.0])[:batch_size],
            "condition_mask": None,
        }


class TestCosmosControlNet(CosmosControlNetTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestCosmosControlNetMask(CosmosControlNetMaskTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class EverySecondBlockTesterConfig(Cosmos2_5TransformerTesterConfig):
    """A transformer that takes residuals after the first and the last of its blocks."""

    def get_init_dict(self):
        return {**super().get_init_dict(), "num_layers": 3, "controlnet_block_every_n": 2}


@torch.no_grad()
def beside_worker(split: tuple[str, ...]) -> tuple[float, float]:
    """Error of the transformer's output where some of the two are parallel, and the share of the ControlNet in it."""
    configs = {"transformer": EverySecondBlockTesterConfig(), "controlnet": CosmosControlNetTesterConfig()}
    models = {name: config.get_model() for name, config in configs.items()}
    inputs = {name: config.get_inputs(2) for name, config in configs.items()}

    def run(scale: float) -> torch.Tensor:
        inputs["controlnet"]["conditioning_scale"] = scale
        with torchvision_in(controlnet_cosmos):
            (residuals,) = models["controlnet"](**inputs["controlnet"], return_dict=False)
        given = {**inputs["transformer"], "block_controlnet_hidden_states": residuals}
        return configs["transformer"].get_output(models["transformer"], given)

    reference = run(0.8)
    share = relative_l2(run(0.0), reference)
    for name in split:
        models[name].enable_parallelism(config=ParallelConfig(ulysses=2))
    return relative_l2(run(0.8), reference), share


class TestCosmosControlNetBesideItsTransformer(unittest.TestCase):
    @parameterized.expand([("both", ("transformer", "controlnet")), ("one", ("transformer",))])
    def test_parity(self, name, split):
        for error, share in run_ranks(2, beside_worker, split):
            assert error <= FLOAT32_BAR, error
            assert share > 0.1, share


if __name__ == "__main__":
    unittest.main()
