import unittest

from diffusers import HunyuanDiT2DControlNetModel

from ..testing_utils.common import randn
from ..testing_utils.plans import PlanTesterMixin
from ..transformers.test_models_transformer_hunyuan_dit import HunyuanDiTTesterConfig


class HunyuanDiTControlNetTesterConfig(HunyuanDiTTesterConfig):
    """The first two blocks of six."""

    model_class = HunyuanDiT2DControlNetModel
    real_init_dict = {"in_channels": 4, "patch_size": 2, "hidden_size": 1408, "mlp_ratio": 4.3637}

    def get_init_dict(self):
        init = super().get_init_dict()
        init["transformer_num_layers"] = init.pop("num_layers")
        return init

    def get_inputs(self, batch_size=1):
        inputs = {**self.get_dummy_inputs(batch_size), "controlnet_cond": randn(batch_size, 4, 10, 6, seed=5)}
        return {**inputs, "conditioning_scale": 0.7}

    def get_output(self, model, inputs):
        return super(HunyuanDiTTesterConfig, self).get_output(model, inputs)


class TestHunyuanDiTControlNet(HunyuanDiTControlNetTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
