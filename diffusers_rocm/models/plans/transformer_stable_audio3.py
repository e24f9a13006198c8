"""Stable Audio 3."""

from .building_blocks import FEW_INPUTS, FEW_OUTPUTS
from .context_plan import ContextParallelPlan, gather, leading_count, split, split_trailing
from .plan import TensorParallelPlan, at


# Differential attention has two queries and two keys for each value, one after the other in the fused projections.
_ATTENTION = {
    "": "local:heads=heads",
    "to_qkv?": "column:heads*",
    "to_q?": "column:heads*",
    "to_kv?": "column:heads*",
    "q_norm": "head_norm",
    "k_norm": "head_norm",
    "to_out": "row:heads",
}

_TWO_LINEARS = {"0": "column:mlp", "2": "row:mlp"}

TENSOR_PARALLEL_PLANS = {
    "StableAudio3DiTModel": TensorParallelPlan(
        {
            **at("transformer_blocks.*.self_attn", _ATTENTION),
            **at("transformer_blocks.*.cross_attn", _ATTENTION),
            **at("transformer_blocks.*.ff", {"proj_in": "column:mlp+mlp", "proj_out": "row:mlp"}),
            **at("transformer_blocks.*.to_local_embed", _TWO_LINEARS),
            **at("to_timestep_embed", _TWO_LINEARS),
            **at("to_cond_embed", _TWO_LINEARS),
            **at("to_global_embed", _TWO_LINEARS),
            **at("global_cond_embedder", _TWO_LINEARS),
            "proj_in": FEW_INPUTS,
            "proj_out": FEW_OUTPUTS,
        },
        heads={"heads": ("num_heads", lambda config: config["embed_dim"] // config["num_heads"])},
    )
}

# diffusers has none. The first tokens are the model's memory, which it takes away after the last block.
CONTEXT_PARALLEL_PLANS = {
    "StableAudio3DiTModel": ContextParallelPlan(
        {
            "rotary_pos_emb": {0: split(0, 2, output=True)},
            "transformer_blocks.0": {"hidden_states": split(1, 3)},
            "transformer_blocks.*": {"local_seq": split_trailing(1), "num_memory_tokens": leading_count()},
            "transformer_blocks.-1": gather(),
        },
        streams=("hidden_states",),
        whole=("transformer_blocks.*.cross_attn",),
    )
}
