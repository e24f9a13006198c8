"""Latte."""

from .context_plan import ContextParallelPlan, gather, split, split_each_item
from .pixart_transformer_2d import PIXART, PIXART_BLOCK
from .plan import TensorParallelPlan, at


TENSOR_PARALLEL_PLANS = {
    "LatteTransformer3DModel": TensorParallelPlan({**PIXART, **at("temporal_transformer_blocks.*", PIXART_BLOCK)})
}

# diffusers has none. Each frame's tokens are split, so that attention over time is local. Its blocks take the step's
# embedding for each token.
CONTEXT_PARALLEL_PLANS = {
    "LatteTransformer3DModel": ContextParallelPlan(
        {
            "transformer_blocks.0": {"hidden_states": split(1, 3)},
            "temporal_transformer_blocks.*": {"timestep": split_each_item(0)},
            "proj_out": gather(),
        },
        streams=("hidden_states",),
        whole=("transformer_blocks.*.attn2", "temporal_transformer_blocks.*.attn1"),
    )
}
