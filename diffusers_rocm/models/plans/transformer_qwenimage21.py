"""Qwen-Image 2.1."""

from .building_blocks import ATTENTION, ATTENTION_OUT, FEW_INPUTS, FEW_OUTPUTS, ONE_ROW
from .plan import TensorParallelPlan, at


# The processor takes the width of a head from inner_dim and heads.
_ATTENTION = {**ATTENTION, **ATTENTION_OUT, "": "local:heads=heads,inner_dim=heads"}

TENSOR_PARALLEL_PLANS = {
    "QwenImage21Transformer2DModel": TensorParallelPlan(
        {
            **at("transformer_blocks.*.attn", _ATTENTION),
            "transformer_blocks.*.img_mlp.proj": "column:mlp",
            "transformer_blocks.*.img_mlp.gate_layer": "column:mlp",
            "transformer_blocks.*.img_mlp.out": "row:mlp",
            "txt_in.in_layer": "column:mlp",
            "txt_in.out_layer": "row:mlp",
            # One for all blocks.
            "modulation.1": "modulation",
            "norm_out.linear": "modulation",
            "img_in": FEW_INPUTS,
            "time_text_embed": ONE_ROW,
            "proj_out": FEW_OUTPUTS,
        },
        embedding="time_text_embed",
    )
}
