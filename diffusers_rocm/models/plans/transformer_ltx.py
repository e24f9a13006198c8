"""LTX-Video."""

from .context_plan import ContextParallelPlan, gather, split


# diffusers' plan splits the text as well and gathers it in each cross-attention, where its mask then does not fit; and
# it leaves whole the timestep that image to video has for each token.
CONTEXT_PARALLEL_PLANS = {
    "LTXVideoTransformer3DModel": ContextParallelPlan(
        {
            "": {"hidden_states": split(1, 3), "timestep": split(1, 2)},
            "rope": {0: split(1, 3, output=True), 1: split(1, 3, output=True)},
            "proj_out": gather(),
        },
        streams=("hidden_states",),
        whole=("transformer_blocks.*.attn2",),
    )
}
