"""LTX-Video."""

from diffusers.models.transformers.transformer_ltx import LTXVideoAttnProcessor

from .building_blocks import (
    ATTENTION_OVER_ALL_HEADS,
    FEED_FORWARD,
    FEW_INPUTS,
    FEW_OUTPUTS,
    cross_attention_slices,
)
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at


TENSOR_PARALLEL_PLANS = {
    "LTXVideoTransformer3DModel": TensorParallelPlan(
        {
            "rope": "output:heads",
            **at("transformer_blocks.*.attn1", ATTENTION_OVER_ALL_HEADS),
            **at("transformer_blocks.*.attn2", ATTENTION_OVER_ALL_HEADS),
            **at("transformer_blocks.*.ff", FEED_FORWARD),
            "proj_in": FEW_INPUTS,
            "proj_out": FEW_OUTPUTS,
            "caption_projection": "replicate:two small Linears; every rank needs the output",
            "time_embed": "replicate:2% of the weights; its output is whole, for each token in image to video",
        },
        token_slices=cross_attention_slices("transformer_blocks", "ff", LTXVideoAttnProcessor),
    )
}

# diffusers' plan splits the text as well and gathers it in each cross-attention, where its mask then does not fit; and
# it leaves whole the timestep that image to video has for each token.
CONTEXT_PARALLEL_PLANS = {
    "LTXVideoTransformer3DModel": ContextParallelPlan(
        {
            "": {"hidden_states": split(1, 3), "timestep": split(1, 2)},
            "rope": {0: split(1, 3, output=True), 1: split(1, 3, output=True)},
            "proj_out": gather(),
        },
        streams=("hidden_states",),
        whole=("transformer_blocks.*.attn2",),
    )
}
