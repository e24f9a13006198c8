"""SANA-WM: attention to frames one after another, by gated linear attention, and along a camera's path."""

from collections.abc import Mapping
from typing import Any

from .building_blocks import FEW_INPUTS, FEW_OUTPUTS
from .plan import TensorParallelPlan, at


def _heads(config: Mapping[str, Any]) -> int:
    return config["hidden_size"] // config["linear_head_dim"]


def _cross_head_dim(config: Mapping[str, Any]) -> int:
    return config["hidden_size"] // config["num_attention_heads"]


# Both kinds of attention give their heads the width of their input.
_ATTENTION = {
    "": "local_input:heads=heads,cam_heads=heads,A_log=gates,dt_bias=gates",
    "qkv": "column_of_part:heads+heads+heads",
    "q_proj_cam": "column_of_part:heads",
    "k_proj_cam": "column_of_part:heads",
    "v_proj_cam": "column_of_part:heads",
    "beta_proj": "column_of_part:gates",
    "gate_proj": "column_of_part:gates",
    "output_gate": "column_of_part:heads",
    "out_proj_cam": "column_of_part:heads",
    "proj": "row:heads",
    **{f"{each}_norm{branch}": "norm:heads" for each in "qk" for branch in ("", "_cam")},
    **{f"conv_{each}{branch}?": "local:hidden_size=heads,weight=heads" for each in "qkv" for branch in ("", "_cam")},
}

_CROSS_ATTENTION = {
    "": "local_input:heads=cross_heads",
    "q_linear": "column_of_part:cross_heads",
    "kv_linear": "column:cross_heads+cross_heads",
    "q_norm": "norm:cross_heads",
    "k_norm": "norm:cross_heads",
    "proj": "row:cross_heads",
}

TENSOR_PARALLEL_PLANS = {
    "SanaWMTransformer3DModel": TensorParallelPlan(
        {
            **at("blocks.*.attn", _ATTENTION),
            **at("blocks.*.cross_attn", _CROSS_ATTENTION),
            "blocks.*.mlp.inverted_conv.conv?": "conv_column:mlp+mlp",
            "blocks.*.mlp.depth_conv.conv?": "conv_depthwise:mlp+mlp",
            "blocks.*.mlp.point_conv.conv?": "conv_row:mlp",
            "blocks.*.mlp.t_conv?": "conv_gather:mlp",
            "blocks.*.mlp.fc1?": "column:mlp",
            "blocks.*.mlp.fc2?": "row:mlp",
            "blocks.*.plucker_proj?": "gather",
            "t_block.1": "gather",
            "y_embedder.y_proj.fc1": "column:mlp",
            "y_embedder.y_proj.fc2": "row:mlp",
            "t_embedder": "replicate:one row a frame; every rank needs the output",
            "x_embedder": FEW_INPUTS,
            "plucker_embedder?": FEW_INPUTS,
            "raymap_embedder": FEW_INPUTS,
            "final_layer": FEW_OUTPUTS,
        },
        heads={
            "heads": (_heads, "linear_head_dim"),
            "gates": (_heads, 1),
            "cross_heads": ("num_attention_heads", _cross_head_dim),
        },
    )
}
