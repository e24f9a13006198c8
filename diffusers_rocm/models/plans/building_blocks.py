"""The rules for the modules that diffusers' transformers share; a family's plan is composed of them with `at`."""

from .plan import TokenSlicePlan, at


# Attention with separate projections (`Attention`, `FluxAttention`, ...), its heads dealt to the ranks. The fused
# projections appear once `fuse_qkv_projections()` was called. Some processors take the width of a head from inner_dim
# and heads.
ATTENTION = {
    "": "local:heads=heads,inner_dim=heads",
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

# With q and k normalised across all heads.
ATTENTION_OVER_ALL_HEADS = {
    **ATTENTION,
    **ATTENTION_OUT,
    "norm_q?": "norm:heads",
    "norm_k?": "norm:heads",
    "to_kv?": "column:heads+heads",
}

# `FeedForward` with a plain activation.
FEED_FORWARD = {"net.0.proj": "column:mlp", "net.2": "row:mlp"}

# `FeedForward` with GEGLU or SwiGLU: values and gates in one projection.
GATED_FEED_FORWARD = {"net.0.proj": "column:mlp+mlp", "net.2": "row:mlp"}

# Blocks of two streams, as those of FLUX.1.
DOUBLE_STREAM_BLOCK = {
    **at("attn", JOINT_ATTENTION),
    **at("ff", FEED_FORWARD),
    **at("ff_context", FEED_FORWARD),
    "norm1.linear": "modulation",
    "norm1_context.linear": "modulation",
}

# Blocks of one stream. The input of proj_out is [attention | mlp]: each of the two is split by itself, so a rank's
# columns are not adjacent.
SINGLE_STREAM_BLOCK = {
    **at("attn", ATTENTION),
    "proj_mlp": "column:mlp",
    "proj_out": "row:heads+mlp",
    "norm.linear": "modulation",
}

# What is made together of tokens in slices (`TokenSlicePlan`).
QUERY_KEY_VALUE = ("to_q", "to_k", "to_v")
DOUBLE_STREAM_TOGETHER = (
    tuple(f"transformer_blocks.*.attn.{name}" for name in QUERY_KEY_VALUE),
    tuple(f"transformer_blocks.*.attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj")),
)


def cross_attention_slices(blocks: str, mlp: str, processor: type, gathered: str = "proj_out") -> TokenSlicePlan:
    """Of blocks of one stream: attention (`attn1`), attention to conditions, which stay whole (`attn2`), and an MLP.

    Not where each token or frame has a timestep, which would have to go with it.
    """
    return TokenSlicePlan(
        streams=("hidden_states",),
        sliced=f"{blocks}.0",
        not_with={"timestep": lambda timestep: timestep.ndim > 1},
        whole={f"{blocks}.*.{name}": ("hidden_states",) for name in ("attn1", "attn2", mlp)},
        gathered=gathered,
        processors=(processor,),
        together=(tuple(f"{blocks}.*.attn1.{name}" for name in QUERY_KEY_VALUE),),
    )


# Why modules are left whole.
FEW_INPUTS = "replicate:few input channels; every rank needs the output"
FEW_OUTPUTS = "replicate:few output channels"
SMALL_LINEAR = "replicate:one small Linear; every rank needs the output"
ONE_ROW = "replicate:one row a step; every rank needs the output"
