"""Allegro."""

from .building_blocks import ATTENTION, ATTENTION_OUT, FEED_FORWARD, FEW_INPUTS, FEW_OUTPUTS, ONE_ROW
from .context_plan import ContextParallelPlan, Refused, gather, split
from .plan import TensorParallelPlan, at


TENSOR_PARALLEL_PLANS = {
    "AllegroTransformer3DModel": TensorParallelPlan(
        {
            **at("transformer_blocks.*.attn1", ATTENTION | ATTENTION_OUT),
            **at("transformer_blocks.*.attn2", ATTENTION | ATTENTION_OUT),
            **at("transformer_blocks.*.ff", FEED_FORWARD),
            "adaln_single.linear": "gather",
            "adaln_single.emb": ONE_ROW,
            "caption_projection": "replicate:two small Linears; every rank needs the output",
            "pos_embed": FEW_INPUTS,
            "proj_out": FEW_OUTPUTS,
        }
    )
}

# diffusers has none. The rotary embedding comes as ((frequencies of t, h, w), (positions of t, h, w)).
CONTEXT_PARALLEL_PLANS = {
    "AllegroTransformer3DModel": ContextParallelPlan(
        {
            "": {
                "image_rotary_emb": [None, split(1, 2)],
                "attention_mask": Refused("its processor fits the mask to one rank's tokens"),
            },
            "transformer_blocks.0": {"hidden_states": split(1, 3)},
            "proj_out": gather(),
        },
        streams=("hidden_states",),
        whole=("transformer_blocks.*.attn2",),
    )
}
