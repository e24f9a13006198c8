"""Bria 3.2."""

from dataclasses import replace

from diffusers.models.transformers.transformer_bria import BriaAttnProcessor

from .building_blocks import DOUBLE_STREAM_BLOCK, FEW_INPUTS, FEW_OUTPUTS, ONE_ROW, SINGLE_STREAM_BLOCK, SMALL_LINEAR
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at
from .transformer_flux import FLUX_SLICES


TENSOR_PARALLEL_PLANS = {
    "BriaTransformer2DModel": TensorParallelPlan(
        {
            **at("transformer_blocks.*", DOUBLE_STREAM_BLOCK),
            **at("single_transformer_blocks.*", SINGLE_STREAM_BLOCK),
            "norm_out.linear": "modulation",
            "x_embedder": FEW_INPUTS,
            "context_embedder": SMALL_LINEAR,
            "time_embed": ONE_ROW,
            "proj_out": FEW_OUTPUTS,
        },
        embedding="time_embed",
        token_slices=replace(
            FLUX_SLICES,
            processors=(BriaAttnProcessor,),
            besides=("controlnet_block_samples",),
            not_with={"attention_kwargs": bool, "controlnet_single_block_samples": bool},
        ),
    )
}

# diffusers has none.
CONTEXT_PARALLEL_PLANS = {
    "BriaTransformer2DModel": ContextParallelPlan(
        {
            "": {
                "hidden_states": split(1, 3),
                "encoder_hidden_states": split(1, 3),
                "img_ids": split(0, 2),
                "txt_ids": split(0, 2),
                "controlnet_block_samples": split(1, 3),
            },
            "proj_out": gather(),
        }
    )
}
