"""FLUX.1: dev, schnell, Kontext, Fill, and its ControlNets."""

from diffusers import FluxTransformer2DModel

from .building_blocks import ATTENTION, FEED_FORWARD, JOINT_ATTENTION
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at


_DOUBLE_BLOCK = {
    **at("attn", JOINT_ATTENTION),
    **at("ff", FEED_FORWARD),
    **at("ff_context", FEED_FORWARD),
    "norm1.linear": "modulation",
    "norm1_context.linear": "modulation",
}

# The input of proj_out is [attention | mlp]: each of the two is split by itself, so a rank's columns are not adjacent.
_SINGLE_BLOCK = {
    **at("attn", ATTENTION),
    "proj_mlp": "column:mlp",
    "proj_out": "row:heads+mlp",
    "norm.linear": "modulation",
}

_COMMON = {
    **at("transformer_blocks.*", _DOUBLE_BLOCK),
    **at("single_transformer_blocks.*", _SINGLE_BLOCK),
    "x_embedder": "replicate:few input channels; every rank needs the output",
    "context_embedder": "replicate:one small Linear; every rank needs the output",
    "time_text_embed": "replicate:one row a step; every rank needs the output",
}

IP_ADAPTER = {
    **at("transformer_blocks.*.attn", {"processor?": "flux_ip_adapter"}),
    **at("transformer_blocks.*.attn.processor", {"to_k_ip.*?": "column:heads", "to_v_ip.*?": "column:heads"}),
    "encoder_hid_proj?": "replicate:the image projection of an IP-Adapter, a few tokens a picture",
}
IP_ADAPTER_KEYS = ("transformer_blocks.*.attn.processor.to_k_ip.*",)

FLUX_TRANSFORMER = TensorParallelPlan(
    {
        **_COMMON,
        **IP_ADAPTER,
        "norm_out.linear": "modulation",
        "proj_out": "replicate:few output channels",
    },
    embedding="time_text_embed",
)

FLUX_CONTROLNET = TensorParallelPlan(
    {
        **_COMMON,
        "controlnet_blocks.*": "gather",
        "controlnet_single_blocks.*": "gather",
        "controlnet_x_embedder": "replicate:few input channels; every rank needs the output",
        "input_hint_block?": "replicate:convolutions of 16 channels",
    },
    embedding="time_text_embed",
)

TENSOR_PARALLEL_PLANS = {
    "FluxTransformer2DModel": FLUX_TRANSFORMER,
    "FluxControlNetModel": FLUX_CONTROLNET,
}

# diffusers' plan, and what a ControlNet adds to the image stream. An IP-Adapter's image prompt stays whole.
_SPLIT = FluxTransformer2DModel._cp_plan[""]

CONTEXT_PARALLEL_PLANS = {
    "FluxTransformer2DModel": ContextParallelPlan(
        {
            "": {
                **_SPLIT,
                "controlnet_block_samples": split(1, 3),
                "controlnet_single_block_samples": split(1, 3),
            },
            "proj_out": gather(),
        },
        whole_keys=IP_ADAPTER_KEYS,
    ),
    # diffusers has none.
    "FluxControlNetModel": ContextParallelPlan(
        {
            "": {**_SPLIT, "controlnet_cond": split(1, 3)},
            "controlnet_blocks.*": gather(),
            "controlnet_single_blocks.*": gather(),
        },
        impossible={
            "controlnet_mode_embedder": "a union ControlNet puts its mode before the text of every rank; leave it "
            "whole, a split transformer takes what it gives"
        },
    ),
}
