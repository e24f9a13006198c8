"""Chroma."""

from diffusers import FluxTransformer2DModel

from .building_blocks import ATTENTION, FEED_FORWARD, JOINT_ATTENTION
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
            "distilled_guidance_layer.in_proj": "replicate:few input channels; every rank needs the output",
            "x_embedder": "replicate:few input channels; every rank needs the output",
            "context_embedder": "replicate:one small Linear; every rank needs the output",
            "proj_out": "replicate:few output channels",
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
