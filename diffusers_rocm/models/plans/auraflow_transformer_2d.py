"""AuraFlow."""

from .building_blocks import ATTENTION, ATTENTION_OUT, JOINT_ATTENTION
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
            "pos_embed": "replicate:few input channels; every rank needs the output",
            "context_embedder": "replicate:one small Linear; every rank needs the output",
            "time_step_proj": "replicate:one row a step; every rank needs the output",
            "proj_out": "replicate:few output channels",
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
