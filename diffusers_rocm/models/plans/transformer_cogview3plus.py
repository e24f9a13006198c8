"""CogView3-Plus."""

from .context_plan import ContextParallelPlan
from .plan import TensorParallelPlan
from .transformer_cogview4 import COGVIEW, COGVIEW_SPLIT


TENSOR_PARALLEL_PLANS = {
    "CogView3PlusTransformer2DModel": TensorParallelPlan(COGVIEW, embedding="time_condition_embed")
}

# diffusers has none.
CONTEXT_PARALLEL_PLANS = {"CogView3PlusTransformer2DModel": ContextParallelPlan(COGVIEW_SPLIT)}
