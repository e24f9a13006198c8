"""Helios."""

from .building_blocks import ATTENTION_OVER_ALL_HEADS, FEED_FORWARD, FEW_INPUTS, FEW_OUTPUTS, ONE_ROW
from .context_plan import ContextParallelPlan, gather, split, trailing_count
from .plan import TensorParallelPlan, at


TENSOR_PARALLEL_PLANS = {
    "HeliosTransformer3DModel": TensorParallelPlan(
        {
            **at("blocks.*.attn1", ATTENTION_OVER_ALL_HEADS),
            **at("blocks.*.attn2", ATTENTION_OVER_ALL_HEADS),
            # The scales are there where the history is amplified.
            "blocks.*.attn1": "local:heads=heads,inner_dim=heads,history_key_scale=scales",
            **at("blocks.*.ffn", FEED_FORWARD),
            "condition_embedder.time_proj": "gather",
            "condition_embedder.time_embedder": ONE_ROW,
            "condition_embedder.text_embedder": "replicate:two small Linears; every rank needs the output",
            "patch_embedding": FEW_INPUTS,
            "patch_short?": FEW_INPUTS,
            "patch_mid?": FEW_INPUTS,
            "patch_long?": FEW_INPUTS,
            "proj_out": FEW_OUTPUTS,
        },
        heads={
            "heads": ("num_attention_heads", "attention_head_dim"),
            "scales": ("num_attention_heads", 1),
        },
    )
}

# diffusers' plan splits and gathers around every attention and feed-forward, and counts 40 blocks whatever there are.
# Here the history that comes before the latents is split with them: a rank may have tokens of the one, or of both.
CONTEXT_PARALLEL_PLANS = {
    "HeliosTransformer3DModel": ContextParallelPlan(
        {
            "blocks.0": {"hidden_states": split(1, 3)},
            "blocks.*": {
                "temb": split(1, 4),
                "rotary_emb": split(1, 3),
                "original_context_length": trailing_count(),
            },
            "blocks.-1": gather(),
        },
        streams=("hidden_states",),
        whole=("blocks.*.attn2",),
    )
}
