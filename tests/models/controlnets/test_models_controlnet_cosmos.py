import unittest
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F
from diffusers import CosmosControlNetModel
from diffusers.models.controlnets import controlnet_cosmos
from parameterized import parameterized

from diffusers_rocm import ParallelConfig

from ...testing_utils import relative_l2, run_ranks
from ..testing_utils.common import BaseModelTesterConfig, flatten_output, randn
from ..testing_utils.parallelism import FLOAT32_BAR
from ..testing_utils.plans import PlanTesterMixin
from ..transformers.test_models_transformer_cosmos import Cosmos2_5TransformerTesterConfig


def _resize(mask: torch.Tensor, size: list[int], interpolation: str) -> torch.Tensor:
    return F.interpolate(mask, size=size, mode=interpolation)


# Of torchvision the forward takes only this, for the padding mask, before anything is split.
TRANSFORMS = SimpleNamespace(
    functional=SimpleNamespace(resize=_resize), InterpolationMode=SimpleNamespace(NEAREST="nearest")
)


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
        return {
            "controls_latents": randn(batch_size, 4, 3, 6, 10, seed=6),
            "latents": inputs["hidden_states"],
            "condition_mask": randn(batch_size, 1, 3, 6, 10, seed=7),
            "padding_mask": randn(1, 1, 12, 20, seed=8),
            "conditioning_scale": [0.7, 1.3],
            **{name: inputs[name] for name in ("encoder_hidden_states", "timestep", "fps")},
        }

    def get_output(self, model, inputs):
        with mock.patch.object(controlnet_cosmos, "transforms", TRANSFORMS, create=True):
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

    def run() -> torch.Tensor:
        with mock.patch.object(controlnet_cosmos, "transforms", TRANSFORMS, create=True):
            (residuals,) = models["controlnet"](**inputs["controlnet"], return_dict=False)
        given = {**inputs["transformer"], "block_controlnet_hidden_states": residuals}
        return flatten_output(models["transformer"](**given, return_dict=False))

    reference = run()
    without = {**inputs["transformer"], "block_controlnet_hidden_states": None}
    share = relative_l2(flatten_output(models["transformer"](**without, return_dict=False)), reference)
    for name in split:
        models[name].enable_parallelism(config=ParallelConfig(ulysses=2))
    return relative_l2(run(), reference), share


class TestCosmosControlNetBesideItsTransformer(unittest.TestCase):
    @parameterized.expand([("both", ("transformer", "controlnet")), ("one", ("transformer",))])
    def test_parity(self, name, split):
        for error, share in run_ranks(2, beside_worker, split):
            assert error <= FLOAT32_BAR, error
            assert share > 0.1, share


if __name__ == "__main__":
    unittest.main()
