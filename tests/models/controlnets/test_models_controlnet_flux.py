import unittest

from diffusers import FluxControlNetModel

from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.parallelism import TensorParallelTesterMixin
from ..transformers.test_models_transformer_flux import FLUX_INIT, flux_inputs


class FluxControlNetTesterConfig(BaseModelTesterConfig):
    model_class = FluxControlNetModel
    repeated_block_count = 0

    def get_init_dict(self):
        return {**FLUX_INIT, "guidance_embeds": True}

    def get_dummy_inputs(self, batch_size=1):
        return {**flux_inputs(batch_size, guidance=True), "controlnet_cond": randn(batch_size, 35, 16, seed=4)}


class TestFluxControlNetTensorParallel(FluxControlNetTesterConfig, TensorParallelTesterMixin, unittest.TestCase):
    pass


if __name__ == "__main__":
    unittest.main()
