"""Ovis-Image."""

from dataclasses import replace

from diffusers.models.transformers.transformer_ovis_image import OvisImageAttnProcessor

from .building_blocks import (
    ATTENTION,
    FEW_INPUTS,
    FEW_OUTPUTS,
    GATED_FEED_FORWARD,
    JOINT_ATTENTION,
    ONE_ROW,
    SMALL_LINEAR,
)
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at
from .transformer_flux import FLUX_SLICES


TENSOR_PARALLEL_PLANS = {
    "OvisImageTransformer2DModel": TensorParallelPlan(
        {
            **at("transformer_blocks.*.attn", JOINT_ATTENTION),
            **at("transformer_blocks.*.ff", GATED_FEED_FORWARD),
            **at("transformer_blocks.*.ff_context", GATED_FEED_FORWARD),
            "transformer_blocks.*.norm1.linear": "modulation",
            "transformer_blocks.*.norm1_context.linear": "modulation",
            **at("single_transformer_blocks.*.attn", ATTENTION),
            "single_transformer_blocks.*": "local:mlp_hidden_dim=mlp",
            "single_transformer_blocks.*.proj_mlp": "column:mlp+mlp",
            "single_transformer_blocks.*.proj_out": "row:heads+mlp",
            "single_transformer_blocks.*.norm.linear": "modulation",
            "norm_out.linear": "modulation",
            "x_embedder": FEW_INPUTS,
            "context_embedder": SMALL_LINEAR,
            "timestep_embedder": ONE_ROW,
            "proj_out": FEW_OUTPUTS,
        },
        embedding="timestep_embedder",
        token_slices=replace(FLUX_SLICES, processors=(OvisImageAttnProcessor,)),
    )
}

# diffusers has none.
CONTEXT_PARALLEL_PLANS = {
    "OvisImageTransformer2DModel": ContextParallelPlan(
        {
            "": {
                "hidden_states": split(1, 3),
                "encoder_hidden_states": split(1, 3),
                "img_ids": split(0, 2),
                "txt_ids": split(0, 2),
            },
            "proj_out": gather(),
        }
    )
}
