"""EasyAnimate 5.1: text to video, inpainting, control."""

from .building_blocks import FEED_FORWARD, FEW_INPUTS, FEW_OUTPUTS, JOINT_ATTENTION, ONE_ROW, SMALL_LINEAR
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at


TENSOR_PARALLEL_PLANS = {
    "EasyAnimateTransformer3DModel": TensorParallelPlan(
        {
            **at("transformer_blocks.*.attn1", JOINT_ATTENTION),
            **at("transformer_blocks.*.ff", FEED_FORWARD),
            **at("transformer_blocks.*.txt_ff", FEED_FORWARD),
            "transformer_blocks.*.norm1.linear": "modulation",
            "transformer_blocks.*.norm2.linear": "modulation",
            "norm_out.linear": "modulation",
            "text_proj": SMALL_LINEAR,
            "text_proj_t5?": SMALL_LINEAR,
            "time_embedding": ONE_ROW,
            "proj": FEW_INPUTS,
            "proj_out": FEW_OUTPUTS,
        },
        embedding="time_embedding",
        impossible={
            "blocks without weights for the text add attention to it as it is": lambda config: (
                config["mmdit_layers"] < config["num_layers"]
            )
        },
    )
}

# diffusers has none.
CONTEXT_PARALLEL_PLANS = {
    "EasyAnimateTransformer3DModel": ContextParallelPlan(
        {
            "rope_embedding": {0: split(0, 2, output=True), 1: split(0, 2, output=True)},
            "transformer_blocks.0": {"hidden_states": split(1, 3), "encoder_hidden_states": split(1, 3)},
            "proj_out": gather(),
        },
    )
}
