import unittest

import pytest
import torch
from diffusers import FluxControlNetModel
from parameterized import parameterized

from diffusers_rocm import TensorParallelConfig

from ...testing_utils import relative_l2, run_ranks
from ..testing_utils.common import BaseModelTesterConfig, randn
from ..testing_utils.context_parallelism import ContextParallelTesterMixin, enable
from ..testing_utils.parallelism import FLOAT32_BAR, TensorParallelTesterMixin
from ..testing_utils.plans import PlanTesterMixin
from ..transformers.test_models_transformer_flux import FLUX_INIT, flux_inputs


class FluxControlNetTesterConfig(BaseModelTesterConfig):
    model_class = FluxControlNetModel
    repeated_block_count = 0

    def get_init_dict(self):
        return {**FLUX_INIT, "guidance_embeds": True}

    def get_dummy_inputs(self, batch_size=1):
        return {**flux_inputs(batch_size, guidance=True), "controlnet_cond": randn(batch_size, 35, 16, seed=4)}


class TestFluxControlNet(FluxControlNetTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestFluxControlNetTensorParallel(FluxControlNetTesterConfig, TensorParallelTesterMixin, unittest.TestCase):
    pass


class TestFluxControlNetContextParallel(FluxControlNetTesterConfig, ContextParallelTesterMixin, unittest.TestCase):
    pass


@torch.no_grad()
def variant_worker(tp: int, init: dict) -> float:
    config = FluxControlNetTesterConfig()
    full = {**config.get_init_dict(), **init}
    config.get_init_dict = lambda: full
    model, inputs = config.get_model(), config.get_dummy_inputs(2)
    if "num_mode" in init:
        inputs["controlnet_mode"] = torch.tensor([[1], [0]])
    reference = config.get_output(model, inputs)
    model.enable_parallelism(config=TensorParallelConfig(tp=tp))
    return relative_l2(config.get_output(model, inputs), reference)


def union_worker() -> str:
    """Its mode would be joined to the text of every rank."""
    config = FluxControlNetTesterConfig()
    init = {**config.get_init_dict(), "num_mode": 3}
    config.get_init_dict = lambda: init
    model = config.get_model()
    with pytest.raises(ValueError) as caught:
        enable(model, (2, 1, "p2p"))
    assert getattr(model, "parallelism", None) is None
    return str(caught.value)


class TestFluxControlNetVariants(unittest.TestCase):
    def test_union_under_context_parallelism(self):
        for message in run_ranks(2, union_worker):
            assert "a FluxControlNetModel with controlnet_mode_embedder cannot be split" in message, message
            assert "leave it whole" in message, message

    @parameterized.expand([("few blocks", {"num_single_layers": 0}), ("union", {"num_mode": 3})])
    def test_variant(self, name, init):
        for error in run_ranks(2, variant_worker, 2, init):
            assert error <= FLOAT32_BAR, error


if __name__ == "__main__":
    unittest.main()
