"""FLUX.1: dev, schnell, Kontext, Fill, and its ControlNets."""

from dataclasses import replace

from diffusers import FluxTransformer2DModel
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor

from .building_blocks import (
    DOUBLE_STREAM_BLOCK,
    DOUBLE_STREAM_TOGETHER,
    FEW_INPUTS,
    FEW_OUTPUTS,
    ONE_ROW,
    QUERY_KEY_VALUE,
    SINGLE_STREAM_BLOCK,
    SMALL_LINEAR,
)
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, TokenSlicePlan, at


_COMMON = {
    **at("transformer_blocks.*", DOUBLE_STREAM_BLOCK),
    **at("single_transformer_blocks.*", SINGLE_STREAM_BLOCK),
    "x_embedder": FEW_INPUTS,
    "context_embedder": SMALL_LINEAR,
    "time_text_embed": ONE_ROW,
}

IP_ADAPTER = {
    **at("transformer_blocks.*.attn", {"processor?": "flux_ip_adapter"}),
    **at("transformer_blocks.*.attn.processor", {"to_k_ip.*?": "column:heads", "to_v_ip.*?": "column:heads"}),
    "encoder_hid_proj?": "replicate:the image projection of an IP-Adapter, a few tokens a picture",
}
IP_ADAPTER_KEYS = ("transformer_blocks.*.attn.processor.to_k_ip.*?",)

# Of models whose blocks are FLUX.1's, each with attention processors of its own.
FLUX_SLICES = TokenSlicePlan(
    streams=("encoder_hidden_states", "hidden_states"),
    not_with={"joint_attention_kwargs": bool},
    whole={
        "transformer_blocks.*.attn": ("hidden_states", "encoder_hidden_states"),
        "transformer_blocks.*.ff": ("hidden_states",),
        "transformer_blocks.*.ff_context": ("hidden_states",),
        "single_transformer_blocks.*.norm": (0,),
    },
    joined={"single_transformer_blocks.*": "image_rotary_emb"},
    ends={"transformer_blocks.*.attn": ("to_out.0", "to_add_out")},
    gathered="proj_out",
    processors=(),
    together=(*DOUBLE_STREAM_TOGETHER, tuple(f"single_transformer_blocks.*.attn.{name}" for name in QUERY_KEY_VALUE)),
    alongside={"single_transformer_blocks.*.attn.to_q": "single_transformer_blocks.*.proj_mlp"},
)

FLUX_TRANSFORMER = TensorParallelPlan(
    {
        **_COMMON,
        **IP_ADAPTER,
        "norm_out.linear": "modulation",
        "proj_out": FEW_OUTPUTS,
    },
    embedding="time_text_embed",
    token_slices=replace(
        FLUX_SLICES,
        processors=(FluxAttnProcessor,),
        besides=("controlnet_block_samples", "controlnet_single_block_samples"),
    ),
)

FLUX_CONTROLNET = TensorParallelPlan(
    {
        **_COMMON,
        "controlnet_blocks.*": "gather",
        "controlnet_single_blocks.*": "gather",
        "controlnet_x_embedder": FEW_INPUTS,
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
