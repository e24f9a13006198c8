"""HunyuanImage 2.1, and its refiner (a video of one frame)."""

from .building_blocks import FEW_INPUTS, FEW_OUTPUTS, ONE_ROW
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at
from .transformer_hunyuan_video import DOUBLE_BLOCK, SINGLE_BLOCK, TOKEN_REFINER


TENSOR_PARALLEL_PLANS = {
    "HunyuanImageTransformer2DModel": TensorParallelPlan(
        {
            **at("transformer_blocks.*", DOUBLE_BLOCK),
            **at("single_transformer_blocks.*", SINGLE_BLOCK),
            **at("context_embedder", TOKEN_REFINER),
            "transformer_blocks.*.norm1.linear": "modulation",
            "transformer_blocks.*.norm1_context.linear": "modulation",
            "single_transformer_blocks.*.norm.linear": "modulation",
            "norm_out.linear": "modulation",
            "context_embedder_2?": "replicate:three small Linears; every rank needs the output",
            "time_guidance_embed": ONE_ROW,
            "x_embedder": FEW_INPUTS,
            "proj_out": FEW_OUTPUTS,
        },
        embedding="time_guidance_embed",
    )
}

# diffusers has none. The text is refined whole; the mask is made for the joined sequence, so it stays whole too.
CONTEXT_PARALLEL_PLANS = {
    "HunyuanImageTransformer2DModel": ContextParallelPlan(
        {
            "rope": {0: split(0, 2, output=True), 1: split(0, 2, output=True)},
            "transformer_blocks.0": {"hidden_states": split(1, 3), "encoder_hidden_states": split(1, 3)},
            "proj_out": gather(),
        },
        streams=("hidden_states", "encoder_hidden_states"),
        whole=("context_embedder.token_refiner.refiner_blocks.*.attn",),
    )
}
