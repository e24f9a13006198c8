"""SkyReels V2: text and image to video, and diffusion forcing (a timestep for each frame)."""

from diffusers.models.transformers.transformer_skyreels_v2 import SkyReelsV2AttnProcessor

from .building_blocks import FEED_FORWARD, cross_attention_slices
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at
from .transformer_wan import WAN, WAN_SPLIT


TENSOR_PARALLEL_PLANS = {
    "SkyReelsV2Transformer3DModel": TensorParallelPlan(
        {
            **WAN,
            **at("fps_projection", FEED_FORWARD, optional=True),
            "fps_embedding?": "replicate:two rows",
        },
        token_slices=cross_attention_slices("blocks", "ffn", SkyReelsV2AttnProcessor, gathered="norm_out"),
    )
}

# diffusers has none. Diffusion forcing modulates what norm_out gives for each token: it is gathered before that.
CONTEXT_PARALLEL_PLANS = {
    "SkyReelsV2Transformer3DModel": ContextParallelPlan(
        {
            "rope": WAN_SPLIT["rope"],
            "blocks.0": WAN_SPLIT["blocks.0"],
            "blocks.*": {"temb": split(2, 4)},
            "norm_out": gather(),
        },
        streams=("hidden_states",),
        whole=("blocks.*.attn2",),
    )
}
