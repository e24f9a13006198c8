"""Ovis-Image."""

from .building_blocks import ATTENTION, GATED_FEED_FORWARD, JOINT_ATTENTION
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at


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
            "x_embedder": "replicate:few input channels; every rank needs the output",
            "context_embedder": "replicate:one small Linear; every rank needs the output",
            "timestep_embedder": "replicate:one row a step; every rank needs the output",
            "proj_out": "replicate:few output channels",
        },
        embedding="timestep_embedder",
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
