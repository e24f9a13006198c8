"""AuraFlow."""

from .building_blocks import (
    ATTENTION,
    ATTENTION_OUT,
    FEW_INPUTS,
    FEW_OUTPUTS,
    JOINT_ATTENTION,
    ONE_ROW,
    SMALL_LINEAR,
)
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at


_FEED_FORWARD = {"linear_1": "column:mlp", "linear_2": "column:mlp", "out_projection": "row:mlp"}

TENSOR_PARALLEL_PLANS = {
    "AuraFlowTransformer2DModel": TensorParallelPlan(
        {
            **at("joint_transformer_blocks.*.attn", JOINT_ATTENTION),
            **at("joint_transformer_blocks.*.ff", _FEED_FORWARD),
            **at("joint_transformer_blocks.*.ff_context", _FEED_FORWARD),
            "joint_transformer_blocks.*.norm1.linear": "modulation",
            "joint_transformer_blocks.*.norm1_context.linear": "modulation",
            **at("single_transformer_blocks.*.attn", ATTENTION | ATTENTION_OUT),
            **at("single_transformer_blocks.*.ff", _FEED_FORWARD),
            "single_transformer_blocks.*.norm1.linear": "modulation",
            "norm_out.linear": "modulation",
            "pos_embed": FEW_INPUTS,
            "context_embedder": SMALL_LINEAR,
            "time_step_proj": ONE_ROW,
            "proj_out": FEW_OUTPUTS,
        },
        embedding="time_step_proj",
    )
}

# diffusers has none.
CONTEXT_PARALLEL_PLANS = {
    "AuraFlowTransformer2DModel": ContextParallelPlan(
        {
            "joint_transformer_blocks.0": {"hidden_states": split(1, 3), "encoder_hidden_states": split(1, 3)},
            "proj_out": gather(),
        }
    )
}
