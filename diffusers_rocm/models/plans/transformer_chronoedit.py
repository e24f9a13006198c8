"""ChronoEdit."""

from dataclasses import replace

from diffusers.models.transformers.transformer_chronoedit import WanAttnProcessor

from .context_plan import ContextParallelPlan
from .plan import TensorParallelPlan
from .transformer_wan import WAN, WAN_SLICES, WAN_SPLIT


TENSOR_PARALLEL_PLANS = {
    "ChronoEditTransformer3DModel": TensorParallelPlan(
        WAN, token_slices=replace(WAN_SLICES, processors=(WanAttnProcessor,))
    )
}

# diffusers' own, and a timestep for each token, which its plan leaves whole.
CONTEXT_PARALLEL_PLANS = {
    "ChronoEditTransformer3DModel": ContextParallelPlan(
        WAN_SPLIT, streams=("hidden_states",), whole=("blocks.*.attn2",)
    )
}
