"""Sana-Video."""

from .plan import TensorParallelPlan, at
from .sana_transformer import SANA_BLOCK, SANA_COMMON, SANA_HEADS


TENSOR_PARALLEL_PLANS = {
    "SanaVideoTransformer3DModel": TensorParallelPlan(
        {
            **at("transformer_blocks.*", SANA_BLOCK),
            "transformer_blocks.*.ff.conv_temp": "conv_gather:mlp",
            **SANA_COMMON,
            "patch_embedding": "replicate:few input channels; every rank needs the output",
            "proj_out": "replicate:few output channels",
        },
        heads=SANA_HEADS,
    )
}
