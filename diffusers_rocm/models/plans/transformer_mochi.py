"""Mochi 1."""

from .building_blocks import ADDED_ATTENTION, ATTENTION, ATTENTION_OUT, FEW_INPUTS, FEW_OUTPUTS, GATED_FEED_FORWARD
from .context_plan import ContextParallelPlan, KeyMask, gather, split
from .plan import TensorParallelPlan, at


# Rotary frequencies are learned for every head. The last block's text ends in its attention.
TENSOR_PARALLEL_PLANS = {
    "MochiTransformer3DModel": TensorParallelPlan(
        {
            **at("transformer_blocks.*.attn1", ATTENTION | ATTENTION_OUT | ADDED_ATTENTION),
            **at("transformer_blocks.*.ff", GATED_FEED_FORWARD),
            **at("transformer_blocks.*.ff_context", GATED_FEED_FORWARD),
            "transformer_blocks.*.norm1.linear": "gather",
            "transformer_blocks.*.norm1_context.linear": "gather",
            "transformer_blocks.*.norm1_context.linear_1": "gather",
            "norm_out.linear": "gather",
            "rope": "output:1=heads",
            "time_embed": "replicate:under 1% of the weights; every rank needs the output",
            "patch_embed": FEW_INPUTS,
            "proj_out": FEW_OUTPUTS,
        }
    )
}

# diffusers has none. Attention goes through the batch, and picks from the text what the mask says.
CONTEXT_PARALLEL_PLANS = {
    "MochiTransformer3DModel": ContextParallelPlan(
        {
            "rope": {0: split(0, 3, output=True), 1: split(0, 3, output=True)},
            "transformer_blocks.0": {"hidden_states": split(1, 3), "encoder_hidden_states": split(1, 3)},
            "transformer_blocks.*": {"encoder_attention_mask": KeyMask("encoder_hidden_states")},
            "proj_out": gather(),
        },
        streams=("hidden_states", "encoder_hidden_states"),
        whole=("time_embed.pooler",),
    )
}
