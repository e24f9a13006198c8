import unittest

from diffusers import OvisImageTransformer2DModel

from ..testing_utils.plans import PlanTesterMixin
from .test_models_transformer_longcat_image import LongCatImageTransformerTesterConfig


class OvisImageTransformerTesterConfig(LongCatImageTransformerTesterConfig):
    """Gates and values in one projection, in both kinds of block."""

    model_class = OvisImageTransformer2DModel


class TestOvisImageTransformer(OvisImageTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
