"""FLUX.2: dev and klein."""

from diffusers import Flux2Transformer2DModel

from .context_plan import ContextParallelPlan


# diffusers' own plan.
CONTEXT_PARALLEL_PLANS = {"Flux2Transformer2DModel": ContextParallelPlan(Flux2Transformer2DModel._cp_plan)}
