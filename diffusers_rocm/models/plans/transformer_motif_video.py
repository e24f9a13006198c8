"""Motif-Video."""

from .building_blocks import ATTENTION, ATTENTION_OUT, FEW_INPUTS, FEW_OUTPUTS, ONE_ROW
from .context_plan import ContextParallelPlan, SplitAlready, gather, split
from .plan import TensorParallelPlan, at
from .transformer_hunyuan_video import DOUBLE_BLOCK, SINGLE_BLOCK


# In single blocks, its queries come from this rank's heads of the joint attention, to which its output is added: the
# attention itself, to a short text, is then over all heads on every rank.
_CROSS_ATTENTION_OF_HEADS = {"to_q": "row:heads", "to_k": "gather", "to_v": "gather", "to_out.0": "column:heads"}

TENSOR_PARALLEL_PLANS = {
    "MotifVideoTransformer3DModel": TensorParallelPlan(
        {
            **at("transformer_blocks.*", DOUBLE_BLOCK),
            **at("transformer_blocks.*.cross_attn", ATTENTION | ATTENTION_OUT, optional=True),
            **at("single_transformer_blocks.*", SINGLE_BLOCK),
            **at("single_transformer_blocks.*.cross_attn", _CROSS_ATTENTION_OF_HEADS, optional=True),
            "transformer_blocks.*.norm1.linear": "modulation",
            "transformer_blocks.*.norm1_context.linear": "modulation",
            "single_transformer_blocks.*.norm.linear": "modulation",
            "norm_out.linear": "modulation",
            "context_embedder": "replicate:two small Linears; every rank needs the output",
            "image_embedder?": "replicate:two small Linears; every rank needs the output",
            "time_text_embed": ONE_ROW,
            "x_embedder": FEW_INPUTS,
            "proj_out": FEW_OUTPUTS,
        },
        embedding="time_text_embed",
    )
}

# diffusers has none. The video attends to the text once more, by itself; that attention cuts the image's tokens off,
# so it gets the text whole.
_TEXT = {"encoder_hidden_states": gather(stream="encoder_hidden_states")}

CONTEXT_PARALLEL_PLANS = {
    "MotifVideoTransformer3DModel": ContextParallelPlan(
        {
            "rope": {0: split(0, 2, output=True), 1: split(0, 2, output=True)},
            "transformer_blocks.0": {"hidden_states": split(1, 3), "encoder_hidden_states": split(1, 3)},
            "transformer_blocks.*.cross_attn?": _TEXT,
            "single_transformer_blocks.*.cross_attn?": _TEXT,
            # The decoder starts from the latents again, joined with what the encoder made of them.
            "single_transformer_blocks.-num_decoder_layers?": {
                "hidden_states": split(1, 3),
                "encoder_hidden_states": SplitAlready("hidden_states"),
            },
            "proj_out": gather(),
        },
        streams=("hidden_states", "encoder_hidden_states"),
        whole=("transformer_blocks.*.cross_attn?", "single_transformer_blocks.*.cross_attn?"),
    )
}
