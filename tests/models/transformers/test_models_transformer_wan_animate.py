import unittest

from diffusers import WanAnimateTransformer3DModel

from ..testing_utils.common import randn
from ..testing_utils.plans import PlanTesterMixin
from .test_models_transformer_wan import WanImageToVideoTransformerTesterConfig


class WanAnimateTransformerTesterConfig(WanImageToVideoTransformerTesterConfig):
    """A face adapter after the first and the third of four blocks; a rank's tokens end within a frame."""

    model_class = WanAnimateTransformer3DModel

    def get_init_dict(self):
        return {
            **super().get_init_dict(),
            "in_channels": 12,
            "latent_channels": 4,
            "num_layers": 4,
            "inject_face_latents_blocks": 2,
            "motion_encoder_channel_sizes": {"4": 8, "8": 8},
            "motion_encoder_size": 8,
            "motion_style_dim": 8,
            "motion_dim": 4,
            "motion_encoder_dim": 8,
            "face_encoder_hidden_dim": 16,
            "face_encoder_num_heads": 2,
        }

    def get_dummy_inputs(self, batch_size=1):
        return {
            **super().get_dummy_inputs(batch_size),
            "hidden_states": randn(batch_size, 12, 3, 6, 10, seed=1),
            "pose_hidden_states": randn(batch_size, 4, 2, 6, 10, seed=4),
            "face_pixel_values": randn(batch_size, 3, 5, 8, 8, seed=5),
        }


class TestWanAnimateTransformer(WanAnimateTransformerTesterConfig, PlanTesterMixin, unittest.TestCase):
    pass
