"""ChronoEdit."""

from diffusers.models.transformers.transformer_chronoedit import WanAttnProcessor

from .building_blocks import cross_attention_slices
from .context_plan import ContextParallelPlan
from .plan import TensorParallelPlan
from .transformer_wan import WAN, WAN_SPLIT


TENSOR_PARALLEL_PLANS = {
    "ChronoEditTransformer3DModel": TensorParallelPlan(
        WAN, token_slices=cross_attention_slices("blocks", "ffn", WanAttnProcessor)
    )
}

# diffusers' own, and a timestep for each token, which its plan leaves whole.
CONTEXT_PARALLEL_PLANS = {
    "ChronoEditTransformer3DModel": ContextParallelPlan(
        WAN_SPLIT, streams=("hidden_states",), whole=("blocks.*.attn2",)
    )
}
