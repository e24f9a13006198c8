import unittest

import torch
from diffusers import ZImageControlNetModel
from parameterized import parameterized

from diffusers_rocm import ParallelConfig

from ...testing_utils import relative_l2, run_ranks
from ..testing_utils.common import BaseModelTesterConfig, flatten_output, randn
from ..testing_utils.parallelism import FLOAT32_BAR
from ..testing_utils.plans import PlanTesterMixin
from ..transformers.test_models_transformer_z_image import ZImageTransformerTesterConfig


class ZImageControlNetTesterConfig(BaseModelTesterConfig):
    """The first: the condition is refined by itself."""

    model_class = ZImageControlNetModel
    real_init_dict = {
        "control_layers_places": [0, 5, 10, 15, 20, 25],
        "control_refiner_layers_places": [0, 1],
        "control_in_dim": 16,
    }
    even_lengths = "the model pads each sequence to a multiple of 32"
    refiner: str | None = None

    def get_init_dict(self):
        return {
            "control_layers_places": [0, 1],
            "control_refiner_layers_places": [0, 1],
            "control_in_dim": 5,
            "add_control_noise_refiner": self.refiner,
            "dim": 5 * 8,
            "n_refiner_layers": 2,
            "n_heads": 5,
            "n_kv_heads": 5,
        }

    def get_model(self, seed=0, dtype=torch.float32):
        transformer = ZImageTransformerTesterConfig().get_model(seed, dtype)
        return ZImageControlNetModel.from_transformer(super().get_model(seed, dtype), transformer)

    def get_dummy_inputs(self, batch_size=1):
        inputs = ZImageTransformerTesterConfig().get_dummy_inputs(batch_size)
        del inputs["controlnet_block_samples"]
        condition = [randn(5, *x.shape[1:], seed=9 + index) for index, x in enumerate(inputs["x"])]
        return {**inputs, "control_context": condition}

    def get_output(self, model, inputs):
        return flatten_output(list(model(**inputs).values()))


class ZImageControlNetRefinerTesterConfig(ZImageControlNetTesterConfig):
    """2.1: layers of its own give hints to the transformer's refiner."""

    refiner = "control_noise_refiner"


class ZImageControlNetTwiceTesterConfig(ZImageControlNetTesterConfig):
    """2.0: its layers run twice, over the picture, and over the picture and the text."""

    refiner = "control_layers"


class TestZImageControlNet(ZImageControlNetTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestZImageControlNetRefiner(ZImageControlNetRefinerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestZImageControlNetTwice(ZImageControlNetTwiceTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


@torch.no_grad()
def both_worker(split: tuple[str, ...]) -> float:
    """Error of the transformer's output where some of the two that share modules are parallel."""
    config = ZImageControlNetTesterConfig()
    transformer = ZImageTransformerTesterConfig().get_model()
    controlnet = BaseModelTesterConfig.get_model(config)
    models = {
        "transformer": transformer,
        "controlnet": ZImageControlNetModel.from_transformer(controlnet, transformer),
    }
    inputs = config.get_inputs(2)

    def run() -> torch.Tensor:
        residuals = models["controlnet"](**inputs)
        shared = {key: value for key, value in inputs.items() if key != "control_context"}
        return flatten_output(transformer(**shared, controlnet_block_samples=residuals, return_dict=False))

    reference = run()
    for name in split:
        models[name].enable_parallelism(config=ParallelConfig(ulysses=2, tp=2))
    return relative_l2(run(), reference)


class TestZImageControlNetBesideItsTransformer(unittest.TestCase):
    @parameterized.expand(
        [("both", ("transformer", "controlnet")), ("the other first", ("controlnet", "transformer"))]
        + [("one", (name,)) for name in ("transformer", "controlnet")]
    )
    def test_parity(self, name, split):
        for error in run_ranks(4, both_worker, split):
            assert error <= FLOAT32_BAR, error


if __name__ == "__main__":
    unittest.main()
