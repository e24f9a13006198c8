"""The rules for the modules that diffusers' transformers share; a family's plan is composed of them with `at`."""

# Attention with separate projections (`Attention`, `FluxAttention`, ...), its heads dealt to the ranks. The fused
# projections appear once `fuse_qkv_projections()` was called.
ATTENTION = {
    "": "local:heads=heads",
    "to_q": "column:heads",
    "to_k": "column:heads",
    "to_v": "column:heads",
    "to_qkv?": "column:heads+heads+heads",
    "norm_q?": "head_norm",
    "norm_k?": "head_norm",
}

ATTENTION_OUT = {"to_out.0": "row:heads"}

# The text stream of joint attention.
ADDED_ATTENTION = {
    "add_q_proj": "column:heads",
    "add_k_proj": "column:heads",
    "add_v_proj": "column:heads",
    "to_added_qkv?": "column:heads+heads+heads",
    "norm_added_q?": "head_norm",
    "norm_added_k?": "head_norm",
    "to_add_out": "row:heads",
}

JOINT_ATTENTION = {**ATTENTION, **ATTENTION_OUT, **ADDED_ATTENTION}

# `FeedForward` with a plain activation.
FEED_FORWARD = {"net.0.proj": "column:mlp", "net.2": "row:mlp"}

# `FeedForward` with GEGLU or SwiGLU: values and gates in one projection.
GATED_FEED_FORWARD = {"net.0.proj": "column:mlp+mlp", "net.2": "row:mlp"}
