"""DiT."""

from .building_blocks import ATTENTION, ATTENTION_OUT, FEED_FORWARD, FEW_INPUTS, FEW_OUTPUTS
from .context_plan import ContextParallelPlan, gather, split
from .pixart_transformer_2d import TWO_LINEARS
from .plan import TensorParallelPlan, at


# Each block embeds timestep and class by itself.
TENSOR_PARALLEL_PLANS = {
    "DiTTransformer2DModel": TensorParallelPlan(
        {
            **at("transformer_blocks.*.attn1", ATTENTION | ATTENTION_OUT),
            **at("transformer_blocks.*.ff", FEED_FORWARD),
            **at("transformer_blocks.*.norm1.emb.timestep_embedder", TWO_LINEARS),
            "transformer_blocks.*.norm1.emb.class_embedder.embedding_table": "embedding",
            "transformer_blocks.*.norm1.linear": "gather",
            "proj_out_1": "gather",
            "pos_embed": FEW_INPUTS,
            "proj_out_2": FEW_OUTPUTS,
        }
    )
}

# diffusers has none.
CONTEXT_PARALLEL_PLANS = {
    "DiTTransformer2DModel": ContextParallelPlan(
        {"transformer_blocks.0": {"hidden_states": split(1, 3)}, "proj_out_2": gather()}, streams=("hidden_states",)
    )
}
