"""Chroma."""

from diffusers import FluxTransformer2DModel

from .building_blocks import ATTENTION, FEED_FORWARD, FEW_INPUTS, FEW_OUTPUTS, JOINT_ATTENTION, SMALL_LINEAR
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at
from .transformer_flux import IP_ADAPTER, IP_ADAPTER_KEYS


# FLUX.1 without modulation Linears: the modulation of all blocks comes out of one MLP, a row each.
TENSOR_PARALLEL_PLANS = {
    "ChromaTransformer2DModel": TensorParallelPlan(
        {
            **at("transformer_blocks.*.attn", JOINT_ATTENTION),
            **at("transformer_blocks.*.ff", FEED_FORWARD),
            **at("transformer_blocks.*.ff_context", FEED_FORWARD),
            **at("single_transformer_blocks.*.attn", ATTENTION),
            "single_transformer_blocks.*.proj_mlp": "column:mlp",
            "single_transformer_blocks.*.proj_out": "row:heads+mlp",
            **IP_ADAPTER,
            "distilled_guidance_layer.layers.*.linear_1": "column:mlp",
            "distilled_guidance_layer.layers.*.linear_2": "row:mlp",
            "distilled_guidance_layer.out_proj": "gather",
            "distilled_guidance_layer.in_proj": FEW_INPUTS,
            "x_embedder": FEW_INPUTS,
            "context_embedder": SMALL_LINEAR,
            "proj_out": FEW_OUTPUTS,
        }
    )
}

# diffusers has none. The mask is that of the joined sequence, and stays whole.
CONTEXT_PARALLEL_PLANS = {
    "ChromaTransformer2DModel": ContextParallelPlan(
        {
            "": {
                **FluxTransformer2DModel._cp_plan[""],
                "controlnet_block_samples": split(1, 3),
                "controlnet_single_block_samples": split(1, 3),
            },
            "proj_out": gather(),
        },
        whole_keys=IP_ADAPTER_KEYS,
    )
}
