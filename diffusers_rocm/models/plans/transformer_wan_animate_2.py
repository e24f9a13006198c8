"""Wan Animate 2: a first pass keeps the keys and values of a reference video, which the others attend to."""

from .building_blocks import ATTENTION_OVER_ALL_HEADS, FEW_INPUTS, FEW_OUTPUTS
from .plan import TensorParallelPlan, at
from .transformer_wan import WAN_CROSS_ATTENTION


_TWO_LINEARS = {"0": "column:mlp", "2": "row:mlp"}

# The cache that is passed in holds the keys and values of each rank's heads.
TENSOR_PARALLEL_PLANS = {
    "WanAnimate2Transformer3DModel": TensorParallelPlan(
        {
            **at("blocks.*.self_attn", ATTENTION_OVER_ALL_HEADS),
            **at("blocks.*.cross_attn", WAN_CROSS_ATTENTION),
            **at("blocks.*.ffn", _TWO_LINEARS),
            **at("text_embedding", _TWO_LINEARS),
            **at("time_embedding", _TWO_LINEARS),
            "time_projection.1": "gather",
            "img_emb.proj.1?": "column:mlp",
            "img_emb.proj.3?": "row:mlp",
            "patch_embedding": FEW_INPUTS,
            "head.head": FEW_OUTPUTS,
        },
        heads={"heads": ("num_heads", lambda config: config["dim"] // config["num_heads"])},
    )
}
