"""Stable Audio Open."""

from .building_blocks import ATTENTION, ATTENTION_OUT, FEW_INPUTS, FEW_OUTPUTS, GATED_FEED_FORWARD, ONE_ROW
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at


# Keys and values of the cross-attention have fewer heads.
_CROSS_ATTENTION = {
    "": "local:heads=groups",
    "to_q": "column:groups",
    "to_k": "column:kv",
    "to_v": "column:kv",
    "to_kv?": "column:kv+kv",
    "to_out.0": "row:groups",
}

TENSOR_PARALLEL_PLANS = {
    "StableAudioDiTModel": TensorParallelPlan(
        {
            **at("transformer_blocks.*.attn1", ATTENTION | ATTENTION_OUT),
            **at("transformer_blocks.*.attn2", _CROSS_ATTENTION),
            **at("transformer_blocks.*.ff", GATED_FEED_FORWARD),
            "timestep_proj": ONE_ROW,
            "global_proj": ONE_ROW,
            "cross_attention_proj": "replicate:two small Linears; every rank needs the output",
            "proj_in": FEW_INPUTS,
            "proj_out": FEW_OUTPUTS,
        },
        heads={
            "heads": ("num_attention_heads", "attention_head_dim"),
            "groups": (
                "num_key_value_attention_heads",
                lambda config: (
                    config["num_attention_heads"]
                    // config["num_key_value_attention_heads"]
                    * config["attention_head_dim"]
                ),
            ),
            "kv": ("num_key_value_attention_heads", "attention_head_dim"),
        },
    )
}

# diffusers has none. The first token is the global one.
CONTEXT_PARALLEL_PLANS = {
    "StableAudioDiTModel": ContextParallelPlan(
        {
            "transformer_blocks.0": {"hidden_states": split(1, 3)},
            "transformer_blocks.*": {"rotary_embedding": split(0, 2), "attention_mask": split(1, 2)},
            "proj_out": gather(),
        },
        streams=("hidden_states",),
        whole=("transformer_blocks.*.attn2",),
    )
}
