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
from .context_plan import ContextParallelPlan, Refused, gather, split
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
    "pos_embed?": "replicate:few input channels, and a table of positions; every rank needs the output",
    "context_embedder?": SMALL_LINEAR,
    "time_text_embed": ONE_ROW,
}

_IP_ADAPTER = {
    "to_k_ip": "column:heads",
    "to_v_ip": "column:heads",
    "norm_ip": ONE_ROW,
    "norm_q": "head_norm",
    "norm_k": "head_norm",
    "norm_ip_k": "head_norm",
}

TENSOR_PARALLEL_PLANS = {
    "SD3Transformer2DModel": TensorParallelPlan(
        {
            **_COMMON,
            **at("transformer_blocks.*.attn.processor", _IP_ADAPTER, optional=True),
            "image_proj?": "replicate:the image projection of an IP-Adapter, a few tokens a picture",
            "norm_out.linear": "modulation",
            "proj_out": FEW_OUTPUTS,
        },
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
            "": {
                "block_controlnet_hidden_states": split(1, 3),
                "skip_layers": Refused("the first block is where it is split", lambda layers: 0 in layers),
            },
            "transformer_blocks.0": _SPLIT,
            "proj_out": gather(),
        },
        streams=_STREAMS,
        impossible={
            "transformer_blocks.*.attn.processor.to_k_ip": "with an IP-Adapter the image attends to itself and to the "
            "prompt's image at once"
        },
    ),
    "SD3ControlNetModel": ContextParallelPlan(
        {"transformer_blocks.0": _SPLIT, "controlnet_blocks.*": gather()}, streams=_STREAMS
    ),
}
