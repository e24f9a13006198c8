"""PixArt-Alpha and PixArt-Sigma."""

from .building_blocks import ATTENTION, ATTENTION_OUT, FEED_FORWARD, FEW_INPUTS, FEW_OUTPUTS, ONE_ROW
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at


CROSS_ATTENTION = {**ATTENTION, **ATTENTION_OUT, "to_kv?": "column:heads+heads"}

# `PixArtAlphaTextProjection` and `TimestepEmbedding` are two Linears.
TWO_LINEARS = {"linear_1": "column:mlp", "linear_2": "row:mlp"}

PIXART_BLOCK = {
    **at("attn1", ATTENTION | ATTENTION_OUT),
    **at("attn2", CROSS_ATTENTION, optional=True),
    **at("ff", FEED_FORWARD),
}

PIXART = {
    **at("transformer_blocks.*", PIXART_BLOCK),
    **at("caption_projection", TWO_LINEARS, optional=True),
    "adaln_single.linear": "gather",
    "adaln_single.emb": ONE_ROW,
    "pos_embed": FEW_INPUTS,
    "proj_out": FEW_OUTPUTS,
}

TENSOR_PARALLEL_PLANS = {"PixArtTransformer2DModel": TensorParallelPlan(PIXART)}

# diffusers has none. The mask is for the image's keys.
CONTEXT_PARALLEL_PLANS = {
    "PixArtTransformer2DModel": ContextParallelPlan(
        {
            "transformer_blocks.0": {"hidden_states": split(1, 3)},
            "transformer_blocks.*": {"attention_mask": split(2, 3)},
            "proj_out": gather(),
        },
        streams=("hidden_states",),
        whole=("transformer_blocks.*.attn2",),
    )
}
