"""Sana-Video."""

from .building_blocks import FEW_INPUTS, FEW_OUTPUTS
from .plan import TensorParallelPlan, at
from .sana_transformer import SANA_BLOCK, SANA_COMMON, SANA_HEADS


TENSOR_PARALLEL_PLANS = {
    "SanaVideoTransformer3DModel": TensorParallelPlan(
        {
            **at("transformer_blocks.*", SANA_BLOCK),
            "transformer_blocks.*.ff.conv_temp": "conv_gather:mlp",
            **SANA_COMMON,
            "patch_embedding": FEW_INPUTS,
            "proj_out": FEW_OUTPUTS,
        },
        heads=SANA_HEADS,
    )
}
