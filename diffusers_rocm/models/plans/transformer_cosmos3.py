"""Cosmos 3: text that sees what is before it; vision, sound and actions that see all. Tokens are dim 0: no batch."""

from .building_blocks import FEW_INPUTS, FEW_OUTPUTS
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at


_ATTENTION = {
    "": "local:num_attention_heads=heads,num_key_value_heads=keys",
    "to_q": "column:heads",
    "to_k": "column:keys",
    "to_v": "column:keys",
    "norm_q": "head_norm",
    "norm_k": "head_norm",
    "k_norm_und_for_gen?": "head_norm",
    "to_out": "row:heads",
    "add_q_proj": "column:heads",
    "add_k_proj": "column:keys",
    "add_v_proj": "column:keys",
    "norm_added_q": "head_norm",
    "norm_added_k": "head_norm",
    "to_add_out": "row:heads",
}

# Nemotron's has no gate.
_FEED_FORWARD = {"gate_proj?": "column:mlp", "up_proj": "column:mlp", "down_proj": "row:mlp"}

TENSOR_PARALLEL_PLANS = {
    "Cosmos3OmniTransformer": TensorParallelPlan(
        {
            **at("layers.*.self_attn", _ATTENTION),
            **at("layers.*.mlp", _FEED_FORWARD),
            **at("layers.*.mlp_moe_gen", _FEED_FORWARD),
            "embed_tokens": "embedding",
            "lm_head": "gather",
            "time_embedder": "replicate:a small MLP; every rank needs the output",
            "proj_in": FEW_INPUTS,
            "proj_out": FEW_OUTPUTS,
            "audio_proj_in?": FEW_INPUTS,
            "audio_proj_out?": FEW_OUTPUTS,
            "action_proj_in?": FEW_INPUTS,
            "action_proj_out?": FEW_OUTPUTS,
        },
        heads={
            "heads": (
                "num_key_value_heads",
                lambda config: config["num_attention_heads"] // config["num_key_value_heads"] * config["head_dim"],
            ),
            "keys": ("num_key_value_heads", "head_dim"),
        },
    )
}

# diffusers has none. Both sequences are split, and whole again where the model joins them.
CONTEXT_PARALLEL_PLANS = {
    "Cosmos3OmniTransformer": ContextParallelPlan(
        {
            "layers.0": {"und_seq": split(0, 2), "gen_seq": split(0, 2)},
            "layers.*": {"rotary_emb": split(0, 2)},
            "norm": gather(0, 2, stream="und_seq"),
            "norm_moe_gen": gather(0, 2),
        },
        streams=("und_seq", "gen_seq"),
        main="gen_seq",
        causal="und_seq",
        main_asks=("layers.*.self_attn",),
    )
}
