"""ACE-Step 1.5."""

from .building_blocks import FEW_INPUTS, FEW_OUTPUTS, SMALL_LINEAR
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at


_ATTENTION = {
    "": "local:heads=heads,kv_heads=kv",
    "to_q": "column:heads",
    "to_k": "column:kv",
    "to_v": "column:kv",
    "norm_q": "head_norm",
    "norm_k": "head_norm",
    "to_out.0": "row:heads",
}

_TIME_EMBEDDING = {"linear_1": "column:mlp", "linear_2": "row:mlp", "time_proj": "gather"}

TENSOR_PARALLEL_PLANS = {
    "AceStepTransformer1DModel": TensorParallelPlan(
        {
            **at("layers.*.self_attn", _ATTENTION),
            **at("layers.*.cross_attn", _ATTENTION),
            **at("layers.*.mlp", {"gate_proj": "column:mlp", "up_proj": "column:mlp", "down_proj": "row:mlp"}),
            **at("time_embed", _TIME_EMBEDDING),
            **at("time_embed_r", _TIME_EMBEDDING),
            "condition_embedder": SMALL_LINEAR,
            "proj_in_conv": FEW_INPUTS,
            "proj_out_conv": FEW_OUTPUTS,
        },
        heads={
            "heads": (
                "num_key_value_heads",
                lambda config: config["num_attention_heads"] // config["num_key_value_heads"] * config["head_dim"],
            ),
            "kv": ("num_key_value_heads", "head_dim"),
        },
    )
}

# diffusers has none. What follows norm_out makes several frames of each token. The mask of sliding windows is whole.
CONTEXT_PARALLEL_PLANS = {
    "AceStepTransformer1DModel": ContextParallelPlan(
        {
            "layers.0": {"hidden_states": split(1, 3)},
            "layers.*": {"position_embeddings": split(0, 2)},
            "norm_out": gather(),
        },
        streams=("hidden_states",),
        whole=("layers.*.cross_attn",),
    )
}
