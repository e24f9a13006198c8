import unittest

from diffusers import QwenImageControlNetModel

from ..testing_utils.common import randn
from ..testing_utils.plans import PlanTesterMixin
from ..transformers.test_models_transformer_qwenimage import QwenImageTransformerTesterConfig


class QwenImageControlNetTesterConfig(QwenImageTransformerTesterConfig):
    """For inpainting: the condition has more channels than the image."""

    model_class = QwenImageControlNetModel

    def get_init_dict(self):
        return {**super().get_init_dict(), "extra_condition_channels": 4}

    def get_dummy_inputs(self, batch_size=1):
        return {**super().get_dummy_inputs(batch_size), "controlnet_cond": randn(batch_size, 35, 20, seed=5)}


class TestQwenImageControlNet(QwenImageControlNetTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
