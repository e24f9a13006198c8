"""Wan 2.1 and 2.2: text to video, image to video, and 5B (a timestep for each token)."""

from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

from .building_blocks import (
    ATTENTION_OVER_ALL_HEADS,
    FEED_FORWARD,
    FEW_INPUTS,
    FEW_OUTPUTS,
    QUERY_KEY_VALUE,
    has_more_dims,
)
from .context_plan import ContextParallelPlan
from .plan import TensorParallelPlan, TokenSlicePlan, at


# With the image's keys and values, of image to video with Wan 2.1.
WAN_CROSS_ATTENTION = {
    **ATTENTION_OVER_ALL_HEADS,
    "add_k_proj?": "column:heads",
    "add_v_proj?": "column:heads",
    "norm_added_k?": "norm:heads",
    "to_added_kv?": "column:heads+heads",
}

WAN_BLOCK = {
    **at("attn1", ATTENTION_OVER_ALL_HEADS),
    **at("attn2", WAN_CROSS_ATTENTION),
    **at("ffn", FEED_FORWARD),
}

WAN = {
    **at("blocks.*", WAN_BLOCK),
    "condition_embedder": "replicate:under 2% of the weights; its output is whole, for each token in 5B",
    "patch_embedding": FEW_INPUTS,
    "proj_out": FEW_OUTPUTS,
}

# Text and image conditions stay whole. In 5B each token has a timestep, which would have to go with it.
WAN_SLICES = TokenSlicePlan(
    streams=("hidden_states",),
    sliced="blocks.0",
    not_with={"timestep": has_more_dims},
    whole={f"blocks.*.{name}": ("hidden_states",) for name in ("attn1", "attn2", "ffn")},
    gathered="proj_out",
    processors=(WanAttnProcessor,),
    together=(tuple(f"blocks.*.attn1.{name}" for name in QUERY_KEY_VALUE),),
)

TENSOR_PARALLEL_PLANS = {"WanTransformer3DModel": TensorParallelPlan(WAN, token_slices=WAN_SLICES)}

# diffusers' own plan. Text and image conditions stay whole, and attention to them (attn2) needs no communication.
WAN_SPLIT = WanTransformer3DModel._cp_plan

CONTEXT_PARALLEL_PLANS = {
    "WanTransformer3DModel": ContextParallelPlan(WAN_SPLIT, streams=("hidden_states",), whole=("blocks.*.attn2",))
}
