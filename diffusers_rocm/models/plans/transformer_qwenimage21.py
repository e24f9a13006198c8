"""Qwen-Image 2.1."""

from .building_blocks import ATTENTION, ATTENTION_OUT
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
            "img_in": "replicate:few input channels; every rank needs the output",
            "time_text_embed": "replicate:one row a step; every rank needs the output",
            "proj_out": "replicate:few output channels",
        },
        embedding="time_text_embed",
    )
}
