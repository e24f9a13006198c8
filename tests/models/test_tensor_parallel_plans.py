"""Plans of diffusers' classes: what is refused because of a model's config."""

import unittest

import diffusers
import torch
from parameterized import parameterized

import diffusers_rocm
from diffusers_rocm.models.plans import TENSOR_PARALLEL_PLANS, WITHOUT_TENSOR_PARALLEL_PLAN

from ..testing_utils import message_of
from .transformers.test_models_transformer_easyanimate import EasyAnimateTransformerTesterConfig


class TestTensorParallelPlans(unittest.TestCase):
    def test_a_config_that_the_plan_is_not_for(self):
        config = EasyAnimateTransformerTesterConfig()
        changed = {**config.get_init_dict(), "mmdit_layers": config.get_init_dict()["num_layers"] - 1}
        with torch.device("meta"):
            model = config.model_class(**changed)
        message = message_of(diffusers_rocm.verify_plan, model, 2)
        assert "EasyAnimateTransformer3DModel cannot be sharded: blocks without weights for the text" in message

    @parameterized.expand(sorted(WITHOUT_TENSOR_PARALLEL_PLAN.items()))
    def test_a_class_without_a_plan_says_why(self, name, why):
        cls = getattr(diffusers, name, None)
        if cls is None:
            self.skipTest(f"this diffusers has no {name}")
        model = object.__new__(cls)
        torch.nn.Module.__init__(model)
        assert name not in TENSOR_PARALLEL_PLANS
        assert f"{name} has no tensor-parallel plan: {why}; the nearest classes" in message_of(
            diffusers_rocm.verify_plan, model, 2
        )
