"""Wan 2.1 and 2.2: text to video, image to video, and 5B (a timestep for each token)."""

from diffusers import WanTransformer3DModel

from .context_plan import ContextParallelPlan


# diffusers' own plan. Text and image conditions stay whole, and attention to them (attn2) needs no communication.
CONTEXT_PARALLEL_PLANS = {
    "WanTransformer3DModel": ContextParallelPlan(
        WanTransformer3DModel._cp_plan, streams=("hidden_states",), whole=("blocks.*.attn2",)
    )
}
