"""Helios."""

from .building_blocks import FEED_FORWARD
from .context_plan import ContextParallelPlan, gather, split, trailing_count
from .plan import TensorParallelPlan, at


# q and k are normalised across all heads.
_ATTENTION = {
    "": "local:heads=heads",
    "to_q": "column:heads",
    "to_k": "column:heads",
    "to_v": "column:heads",
    "norm_q": "norm:heads",
    "norm_k": "norm:heads",
    "to_qkv?": "column:heads+heads+heads",
    "to_kv?": "column:heads+heads",
    "to_out.0": "row:heads",
}

TENSOR_PARALLEL_PLANS = {
    "HeliosTransformer3DModel": TensorParallelPlan(
        {
            **at("blocks.*.attn1", _ATTENTION),
            **at("blocks.*.attn2", _ATTENTION),
            **at("blocks.*.ffn", FEED_FORWARD),
            "condition_embedder.time_proj": "gather",
            "condition_embedder.time_embedder": "replicate:one row a step; every rank needs the output",
            "condition_embedder.text_embedder": "replicate:two small Linears; every rank needs the output",
            "patch_embedding": "replicate:few input channels; every rank needs the output",
            "patch_short?": "replicate:few input channels; every rank needs the output",
            "patch_mid?": "replicate:few input channels; every rank needs the output",
            "patch_long?": "replicate:few input channels; every rank needs the output",
            "proj_out": "replicate:few output channels",
        },
        impossible=lambda config: (
            "its scales of the history, one a head, have no rule (is_amplify_history)"
            if config["is_amplify_history"]
            else None
        ),
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
