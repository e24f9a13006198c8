"""CogVideoX 1.0 and 1.5: text to video, image to video, Fun."""

from .building_blocks import ATTENTION, ATTENTION_OUT, FEED_FORWARD, FEW_OUTPUTS, ONE_ROW
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at


# Attention over [text | video].
COGVIDEOX = {
    **at("transformer_blocks.*.attn1", ATTENTION | ATTENTION_OUT),
    **at("transformer_blocks.*.ff", FEED_FORWARD),
    "transformer_blocks.*.norm1.linear": "modulation",
    "transformer_blocks.*.norm2.linear": "modulation",
    "norm_out.linear": "modulation",
    "patch_embed": "replicate:few input channels, a small Linear for the text, positions; every rank needs the output",
    "time_embedding": ONE_ROW,
    "ofs_embedding?": ONE_ROW,
    "proj_out": FEW_OUTPUTS,
}

# Image to video of 1.5 adds a second embedding to the step's.
TENSOR_PARALLEL_PLANS = {
    "CogVideoXTransformer3DModel": TensorParallelPlan(
        COGVIDEOX, embedding=lambda config: None if config["ofs_embed_dim"] else "time_embedding"
    )
}

# diffusers has none.
CONTEXT_PARALLEL_PLANS = {
    "CogVideoXTransformer3DModel": ContextParallelPlan(
        {
            "": {"image_rotary_emb": split(0, 2)},
            "transformer_blocks.0": {"hidden_states": split(1, 3), "encoder_hidden_states": split(1, 3)},
            "proj_out": gather(),
        },
    )
}
