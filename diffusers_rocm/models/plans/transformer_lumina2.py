"""Lumina-Image 2.0."""

from .building_blocks import ATTENTION, ATTENTION_OUT, FEW_INPUTS, FEW_OUTPUTS
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at


# Queries are dealt in the groups that share a key and a value. The processor takes the width of a head from what the
# projections give, and the number of key heads from that.
_BLOCK = {
    **at("attn", {**ATTENTION, **ATTENTION_OUT, "to_k": "column:kv", "to_v": "column:kv"}),
    "feed_forward.linear_1": "column:mlp",
    "feed_forward.linear_3": "column:mlp",
    "feed_forward.linear_2": "row:mlp",
}
_MODULATED_BLOCK = {**_BLOCK, "norm1.linear": "modulation"}


def _head_dim(config) -> int:
    return config["hidden_size"] // config["num_attention_heads"]


TENSOR_PARALLEL_PLANS = {
    "Lumina2Transformer2DModel": TensorParallelPlan(
        {
            **at("layers.*", _MODULATED_BLOCK),
            **at("noise_refiner.*", _MODULATED_BLOCK),
            **at("context_refiner.*", _BLOCK),
            "norm_out.linear_1": "modulation",
            "norm_out.linear_2": FEW_OUTPUTS,
            "x_embedder": FEW_INPUTS,
            "time_caption_embed": "replicate:small Linears; every rank needs the outputs",
        },
        heads={
            "heads": ("num_kv_heads", lambda config: config["hidden_size"] // config["num_kv_heads"]),
            "kv": ("num_kv_heads", _head_dim),
        },
        embedding="time_caption_embed.timestep_embedder",
    )
}

# diffusers has none. The image is split while it is refined by itself, then joined, and split again with its text. The
# masks are for whole sequences.
_SPLIT = {"hidden_states": split(1, 3)}
_TOKENS = {"image_rotary_emb": split(1, 3)}

CONTEXT_PARALLEL_PLANS = {
    "Lumina2Transformer2DModel": ContextParallelPlan(
        {
            "noise_refiner.0": _SPLIT,
            "noise_refiner.*": _TOKENS,
            "noise_refiner.-1": gather(),
            "layers.0": _SPLIT,
            "layers.*": _TOKENS,
            "norm_out": gather(),
        },
        streams=("hidden_states",),
        whole=("context_refiner.*.attn",),
    )
}
