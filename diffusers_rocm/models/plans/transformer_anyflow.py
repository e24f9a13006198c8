"""AnyFlow: Wan that is told where its step ends, for each frame."""

from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan
from .transformer_wan import WAN


TENSOR_PARALLEL_PLANS = {"AnyFlowTransformer3DModel": TensorParallelPlan(WAN)}

# diffusers has none. The embeddings of the step are for each token.
CONTEXT_PARALLEL_PLANS = {
    "AnyFlowTransformer3DModel": ContextParallelPlan(
        {
            "rope": {0: split(2, 4, output=True), 1: split(2, 4, output=True)},
            "condition_embedder": {0: split(1, 3, output=True), 1: split(1, 3, output=True)},
            "blocks.0": {"hidden_states": split(1, 3)},
            "proj_out": gather(),
        },
        streams=("hidden_states",),
        whole=("blocks.*.attn2",),
    )
}
