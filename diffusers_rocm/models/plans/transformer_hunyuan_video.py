"""HunyuanVideo, its image to video (also by token replacement), and what FramePack shares with it."""

from .building_blocks import (
    ATTENTION,
    ATTENTION_OUT,
    FEED_FORWARD,
    FEW_INPUTS,
    FEW_OUTPUTS,
    JOINT_ATTENTION,
    ONE_ROW,
    SMALL_LINEAR,
)
from .context_plan import ContextParallelPlan, gather, leading_count, split
from .plan import TensorParallelPlan, at


# The text's own blocks, of all HunyuanVideo and HunyuanImage models.
TOKEN_REFINER = {
    **at("token_refiner.refiner_blocks.*.attn", ATTENTION | ATTENTION_OUT),
    **at("token_refiner.refiner_blocks.*.ff", FEED_FORWARD),
    "token_refiner.refiner_blocks.*.norm_out.linear": "gather",
    "time_text_embed": ONE_ROW,
    "proj_in": SMALL_LINEAR,
}

DOUBLE_BLOCK = {
    **at("attn", JOINT_ATTENTION),
    **at("ff", FEED_FORWARD),
    **at("ff_context", FEED_FORWARD),
}

# The input of proj_out is [attention | mlp].
SINGLE_BLOCK = {**at("attn", ATTENTION), "proj_mlp": "column:mlp", "proj_out": "row:heads+mlp"}

# The step's embedding comes in a pair (the other is for token replacement), so its modulation is computed one by one.
HUNYUAN_VIDEO = {
    **at("transformer_blocks.*", DOUBLE_BLOCK),
    **at("single_transformer_blocks.*", SINGLE_BLOCK),
    **at("context_embedder", TOKEN_REFINER),
    "transformer_blocks.*.norm1.linear": "gather",
    "transformer_blocks.*.norm1_context.linear": "gather",
    "single_transformer_blocks.*.norm.linear": "gather",
    "norm_out.linear": "gather",
    "time_text_embed": ONE_ROW,
    "x_embedder": FEW_INPUTS,
    "proj_out": FEW_OUTPUTS,
}

TENSOR_PARALLEL_PLANS = {"HunyuanVideoTransformer3DModel": TensorParallelPlan(HUNYUAN_VIDEO)}

# diffusers has none. The text is refined whole; the mask is made for the joined sequence, so it stays whole too.
CONTEXT_PARALLEL_PLANS = {
    "HunyuanVideoTransformer3DModel": ContextParallelPlan(
        {
            "rope": {0: split(0, 2, output=True), 1: split(0, 2, output=True)},
            "transformer_blocks.0": {"hidden_states": split(1, 3), "encoder_hidden_states": split(1, 3)},
            # Image to video by token replacement modulates the first frame by itself.
            "transformer_blocks.*": {"num_tokens?": leading_count()},
            "single_transformer_blocks.*": {"num_tokens?": leading_count()},
            "proj_out": gather(),
        },
        streams=("hidden_states", "encoder_hidden_states"),
        whole=("context_embedder.token_refiner.refiner_blocks.*.attn",),
    )
}
