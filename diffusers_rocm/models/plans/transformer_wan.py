"""Wan 2.1 and 2.2: text to video, image to video, and 5B (a timestep for each token)."""

from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

from .building_blocks import (
    ATTENTION_OVER_ALL_HEADS,
    FEED_FORWARD,
    FEW_INPUTS,
    FEW_OUTPUTS,
    cross_attention_slices,
)
from .context_plan import ContextParallelPlan
from .plan import TensorParallelPlan, at


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

TENSOR_PARALLEL_PLANS = {
    "WanTransformer3DModel": TensorParallelPlan(
        WAN, token_slices=cross_attention_slices("blocks", "ffn", WanAttnProcessor)
    )
}

# diffusers' own plan. Text and image conditions stay whole, and attention to them (attn2) needs no communication.
WAN_SPLIT = WanTransformer3DModel._cp_plan

CONTEXT_PARALLEL_PLANS = {
    "WanTransformer3DModel": ContextParallelPlan(WAN_SPLIT, streams=("hidden_states",), whole=("blocks.*.attn2",))
}
