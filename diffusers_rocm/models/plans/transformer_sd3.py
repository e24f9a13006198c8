"""Stable Diffusion 3 and 3.5, and their ControlNets."""

from .building_blocks import (
    ADDED_ATTENTION,
    ATTENTION,
    ATTENTION_OUT,
    FEED_FORWARD,
    FEW_INPUTS,
    FEW_OUTPUTS,
    ONE_ROW,
    SMALL_LINEAR,
)
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at


# 3.5 also attends to the image alone in some blocks (attn2). The ControlNet of 3.5 Large has no text.
_COMMON = {
    **at("transformer_blocks.*.attn", ATTENTION | ATTENTION_OUT),
    **at("transformer_blocks.*.attn", ADDED_ATTENTION, optional=True),
    **at("transformer_blocks.*.attn2", ATTENTION | ATTENTION_OUT, optional=True),
    **at("transformer_blocks.*.ff", FEED_FORWARD),
    **at("transformer_blocks.*.ff_context", FEED_FORWARD, optional=True),
    "transformer_blocks.*.norm1.linear": "modulation",
    "transformer_blocks.*.norm1_context.linear?": "modulation",
    "pos_embed?": FEW_INPUTS,
    "context_embedder?": SMALL_LINEAR,
    "time_text_embed": ONE_ROW,
}

TENSOR_PARALLEL_PLANS = {
    "SD3Transformer2DModel": TensorParallelPlan(
        {**_COMMON, "norm_out.linear": "modulation", "proj_out": FEW_OUTPUTS},
        embedding="time_text_embed",
    ),
    "SD3ControlNetModel": TensorParallelPlan(
        {
            **_COMMON,
            "controlnet_blocks.*": "gather",
            "pos_embed_input": FEW_INPUTS,
        },
        embedding="time_text_embed",
    ),
}

# diffusers has none.
_SPLIT = {"hidden_states": split(1, 3), "encoder_hidden_states?": split(1, 3)}
_STREAMS = ("hidden_states", "encoder_hidden_states")

CONTEXT_PARALLEL_PLANS = {
    "SD3Transformer2DModel": ContextParallelPlan(
        {
            "": {"block_controlnet_hidden_states": split(1, 3)},
            "transformer_blocks.0": _SPLIT,
            "proj_out": gather(),
        },
        streams=_STREAMS,
    ),
    "SD3ControlNetModel": ContextParallelPlan(
        {"transformer_blocks.0": _SPLIT, "controlnet_blocks.*": gather()}, streams=_STREAMS
    ),
}
