"""MiniMax Music 3."""

from .building_blocks import FEW_OUTPUTS, SMALL_LINEAR
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at


_BLOCK = {
    "attn": "local:heads=heads",
    "attn.to_q": "column:heads",
    "attn.to_k": "column:heads",
    "attn.to_v": "column:heads",
    "attn.to_out.0": "row:heads",
    "ff_in": "column:mlp+mlp",
    "ff_out": "row:mlp",
}

TENSOR_PARALLEL_PLANS = {
    "MiniMaxMusic3Transformer1DModel": TensorParallelPlan(
        {
            **at("transformer_blocks.*", _BLOCK),
            "time_embed.linear_1": "column:mlp",
            "time_embed.linear_2": "row:mlp",
            "preprocess_conv": "replicate:one small convolution; every rank needs the output",
            "proj_in": SMALL_LINEAR,
            "proj_out": FEW_OUTPUTS,
            "postprocess_conv": FEW_OUTPUTS,
        }
    )
}

# diffusers has none. The first token is the timestep, which the model takes away after the last block.
CONTEXT_PARALLEL_PLANS = {
    "MiniMaxMusic3Transformer1DModel": ContextParallelPlan(
        {
            "rotary_emb": {0: split(0, 2, output=True), 1: split(0, 2, output=True)},
            "transformer_blocks.0": {"hidden_states": split(1, 3)},
            "transformer_blocks.-1": gather(),
        },
        streams=("hidden_states",),
    )
}
