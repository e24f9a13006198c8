"""CogView4."""

from .building_blocks import ATTENTION, ATTENTION_OUT, FEED_FORWARD, FEW_OUTPUTS, ONE_ROW
from .context_plan import ContextParallelPlan, Refused, gather, split
from .plan import TensorParallelPlan, at


COGVIEW = {
    **at("transformer_blocks.*.attn1", ATTENTION | ATTENTION_OUT),
    **at("transformer_blocks.*.ff", FEED_FORWARD),
    "transformer_blocks.*.norm1.linear": "modulation",
    "norm_out.linear": "modulation",
    "patch_embed": "replicate:few input channels, and one small Linear; every rank needs the output",
    "time_condition_embed": ONE_ROW,
    "proj_out": FEW_OUTPUTS,
}

TENSOR_PARALLEL_PLANS = {"CogView4Transformer2DModel": TensorParallelPlan(COGVIEW, embedding="time_condition_embed")}

COGVIEW_SPLIT = {
    "transformer_blocks.0": {"hidden_states": split(1, 3), "encoder_hidden_states": split(1, 3)},
    "proj_out": gather(),
}

# diffusers has none.
CONTEXT_PARALLEL_PLANS = {
    "CogView4Transformer2DModel": ContextParallelPlan(
        {
            "": {"attention_mask": Refused("its processor makes a mask of one rank's queries and keys of it")},
            **COGVIEW_SPLIT,
            "transformer_blocks.*": {"image_rotary_emb": split(0, 2)},
        }
    )
}
