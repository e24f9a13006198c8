import unittest

from diffusers import ChronoEditTransformer3DModel

from ..testing_utils.plans import PlanTesterMixin
from .test_models_transformer_wan import WanImageToVideoTransformerTesterConfig, WanTI2VTransformerTesterConfig


class ChronoEditTransformerTesterConfig(WanImageToVideoTransformerTesterConfig):
    """Image to video, as Wan 2.1."""

    model_class = ChronoEditTransformer3DModel


class ChronoEditTokenTimestepsTesterConfig(WanTI2VTransformerTesterConfig):
    """A timestep for each token."""

    model_class = ChronoEditTransformer3DModel


class TestChronoEditTransformer(ChronoEditTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass


class TestChronoEditTokenTimesteps(ChronoEditTokenTimestepsTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
