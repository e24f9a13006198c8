"""Bria FIBO."""

from .building_blocks import ATTENTION, FEED_FORWARD, JOINT_ATTENTION
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at


TENSOR_PARALLEL_PLANS = {
    "BriaFiboTransformer2DModel": TensorParallelPlan(
        {
            **at("transformer_blocks.*.attn", JOINT_ATTENTION),
            **at("transformer_blocks.*.ff", FEED_FORWARD),
            **at("transformer_blocks.*.ff_context", FEED_FORWARD),
            "transformer_blocks.*.norm1.linear": "modulation",
            "transformer_blocks.*.norm1_context.linear": "modulation",
            **at("single_transformer_blocks.*.attn", ATTENTION),
            "single_transformer_blocks.*.proj_mlp": "column:mlp",
            "single_transformer_blocks.*.proj_out": "row:heads+mlp",
            "single_transformer_blocks.*.norm.linear": "modulation",
            "norm_out.linear": "modulation",
            # Joined to the text before each block.
            "caption_projection.*.linear": "gather",
            "guidance_embed?": "replicate:one row a step; every rank needs the output",
            "x_embedder": "replicate:few input channels; every rank needs the output",
            "context_embedder": "replicate:one small Linear; every rank needs the output",
            "time_embed": "replicate:one row a step; every rank needs the output",
            "proj_out": "replicate:few output channels",
        },
        # Guidance is added to what time_embed gave.
        embedding=lambda config: None if config["guidance_embeds"] else "time_embed",
    )
}

# diffusers has none.
CONTEXT_PARALLEL_PLANS = {
    "BriaFiboTransformer2DModel": ContextParallelPlan(
        {
            "": {
                "hidden_states": split(1, 3),
                "encoder_hidden_states": split(1, 3),
                "img_ids": split(0, 2),
                "txt_ids": split(0, 2),
                "text_encoder_layers": split(1, 3),
            },
            "proj_out": gather(),
        }
    )
}
