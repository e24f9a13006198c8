"""Sana and its ControlNet: linear attention, each head with a small state; convolutions for a feed-forward."""

from .building_blocks import ATTENTION, ATTENTION_OUT, FEW_INPUTS, FEW_OUTPUTS, ONE_ROW
from .plan import TensorParallelPlan, at


# Where q and k are normalised, it is across all heads.
SANA_BLOCK = {
    **at("attn1", {**ATTENTION, **ATTENTION_OUT, "norm_q?": "norm:heads", "norm_k?": "norm:heads"}),
    "attn2": "local:heads=cross_heads",
    "attn2.to_q": "column:cross_heads",
    "attn2.to_k": "column:cross_heads",
    "attn2.to_v": "column:cross_heads",
    "attn2.norm_q?": "norm:cross_heads",
    "attn2.norm_k?": "norm:cross_heads",
    "attn2.to_out.0": "row:cross_heads",
    "ff.conv_inverted": "conv_column:mlp+mlp",
    "ff.conv_depth": "conv_depthwise:mlp+mlp",
    "ff.conv_point": "conv_row:mlp",
}
SANA_HEADS = {
    "heads": ("num_attention_heads", "attention_head_dim"),
    "cross_heads": ("num_cross_attention_heads", "cross_attention_head_dim"),
}
SANA_COMMON = {
    "time_embed.linear": "gather",
    "time_embed.emb?": ONE_ROW,
    "time_embed.timestep_embedder?": ONE_ROW,
    "time_embed.guidance_embedder?": ONE_ROW,
    "caption_projection.linear_1": "column:mlp",
    "caption_projection.linear_2": "row:mlp",
}

TENSOR_PARALLEL_PLANS = {
    "SanaTransformer2DModel": TensorParallelPlan(
        {
            **at("transformer_blocks.*", SANA_BLOCK),
            **SANA_COMMON,
            "patch_embed": FEW_INPUTS,
            "proj_out": FEW_OUTPUTS,
        },
        heads=SANA_HEADS,
    ),
    "SanaControlNetModel": TensorParallelPlan(
        {
            **at("transformer_blocks.*", SANA_BLOCK),
            **SANA_COMMON,
            "patch_embed": FEW_INPUTS,
            "input_block": "gather",
            "controlnet_blocks.*": "gather",
        },
        heads=SANA_HEADS,
    ),
}
