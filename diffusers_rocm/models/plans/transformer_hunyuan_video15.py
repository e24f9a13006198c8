"""HunyuanVideo 1.5: text to video, image to video."""

from .building_blocks import FEW_INPUTS, FEW_OUTPUTS, ONE_ROW
from .context_plan import ContextParallelPlan, KeyMask, gather, split
from .plan import TensorParallelPlan, at
from .transformer_hunyuan_video import DOUBLE_BLOCK, TOKEN_REFINER


TENSOR_PARALLEL_PLANS = {
    "HunyuanVideo15Transformer3DModel": TensorParallelPlan(
        {
            **at("transformer_blocks.*", DOUBLE_BLOCK),
            **at("context_embedder", TOKEN_REFINER),
            "transformer_blocks.*.norm1.linear": "modulation",
            "transformer_blocks.*.norm1_context.linear": "modulation",
            "norm_out.linear": "modulation",
            "context_embedder_2": "replicate:three small Linears; every rank needs the output",
            "image_embedder": "replicate:two small Linears; every rank needs the output",
            "time_embed": ONE_ROW,
            "x_embedder": FEW_INPUTS,
            "proj_out": FEW_OUTPUTS,
        },
        embedding="time_embed",
    )
}

# diffusers has none. Attention makes its mask, from that of the text, for as many tokens as it sees.
CONTEXT_PARALLEL_PLANS = {
    "HunyuanVideo15Transformer3DModel": ContextParallelPlan(
        {
            "rope": {0: split(0, 2, output=True), 1: split(0, 2, output=True)},
            "transformer_blocks.0": {"hidden_states": split(1, 3), "encoder_hidden_states": split(1, 3)},
            "transformer_blocks.*": {"attention_mask": KeyMask("encoder_hidden_states")},
            "proj_out": gather(),
        },
        streams=("hidden_states", "encoder_hidden_states"),
        whole=("context_embedder.token_refiner.refiner_blocks.*.attn",),
    )
}
