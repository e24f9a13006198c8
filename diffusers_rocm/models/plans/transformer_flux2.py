"""FLUX.2: dev and klein."""

from diffusers import Flux2Transformer2DModel
from diffusers.models.transformers.transformer_flux2 import Flux2AttnProcessor, Flux2ParallelSelfAttnProcessor

from .building_blocks import (
    DOUBLE_STREAM_TOGETHER,
    FEW_INPUTS,
    FEW_OUTPUTS,
    JOINT_ATTENTION,
    ONE_ROW,
)
from .context_plan import ContextParallelPlan, Refused
from .plan import TensorParallelPlan, TokenSlicePlan, at


# Gates and values in one projection.
_FEED_FORWARD = {"linear_in": "column:mlp+mlp", "linear_out": "row:mlp"}

# Attention and MLP side by side: their first projections are one, and so are their last ones.
_PARALLEL_ATTENTION = {
    "": "local:heads=heads,inner_dim=heads,mlp_hidden_dim=mlp",
    "to_qkv_mlp_proj": "column:heads+heads+heads+mlp+mlp",
    "to_out": "row:heads+mlp",
    "norm_q": "head_norm",
    "norm_k": "head_norm",
}

TENSOR_PARALLEL_PLANS = {
    "Flux2Transformer2DModel": TensorParallelPlan(
        {
            **at("transformer_blocks.*.attn", JOINT_ATTENTION),
            **at("transformer_blocks.*.ff", _FEED_FORWARD),
            **at("transformer_blocks.*.ff_context", _FEED_FORWARD),
            **at("single_transformer_blocks.*.attn", _PARALLEL_ATTENTION),
            "double_stream_modulation_img.linear": "modulation",
            "double_stream_modulation_txt.linear": "modulation",
            "single_stream_modulation.linear": "modulation",
            "norm_out.linear": "modulation",
            "context_embedder": "gather",
            "x_embedder": FEW_INPUTS,
            "time_guidance_embed": ONE_ROW,
            "proj_out": FEW_OUTPUTS,
        },
        embedding="time_guidance_embed",
        token_slices=TokenSlicePlan(
            streams=("encoder_hidden_states", "hidden_states"),
            not_with={"joint_attention_kwargs": bool, "kv_cache_mode": bool},
            whole={
                "transformer_blocks.*.attn": ("hidden_states", "encoder_hidden_states"),
                "transformer_blocks.*.ff": ("x",),
                "transformer_blocks.*.ff_context": ("x",),
                "single_transformer_blocks.*.attn": ("hidden_states",),
            },
            sliced_again=("context_embedder",),
            joined={"single_transformer_blocks.*": "image_rotary_emb"},
            ends={"transformer_blocks.*.attn": ("to_out.0", "to_add_out")},
            gathered="proj_out",
            processors=(Flux2AttnProcessor, Flux2ParallelSelfAttnProcessor),
            together=DOUBLE_STREAM_TOGETHER,
        ),
    )
}

# diffusers' own plan.
_SPLIT = Flux2Transformer2DModel._cp_plan
_KEPT_KEYS = {"kv_cache_mode?": Refused("the keys that are kept of reference pictures are found by their place")}

CONTEXT_PARALLEL_PLANS = {"Flux2Transformer2DModel": ContextParallelPlan({**_SPLIT, "": _SPLIT[""] | _KEPT_KEYS})}
