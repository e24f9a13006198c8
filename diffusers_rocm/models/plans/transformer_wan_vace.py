"""Wan VACE: a second stack of blocks, over the control video, whose outputs are added to the main one's."""

from .building_blocks import FEW_INPUTS
from .context_plan import ContextParallelPlan, split
from .plan import TensorParallelPlan, at
from .transformer_wan import WAN, WAN_BLOCK, WAN_SPLIT


TENSOR_PARALLEL_PLANS = {
    "WanVACETransformer3DModel": TensorParallelPlan(
        {
            **WAN,
            **at("vace_blocks.*", WAN_BLOCK),
            "vace_blocks.*.proj_in?": "gather",
            "vace_blocks.*.proj_out": "gather",
            "vace_patch_embedding": FEW_INPUTS,
        }
    )
}

# diffusers has none. Of the control blocks only the first takes the video.
CONTEXT_PARALLEL_PLANS = {
    "WanVACETransformer3DModel": ContextParallelPlan(
        {
            **{path: how for path, how in WAN_SPLIT.items() if path},
            "vace_blocks.0": {"hidden_states": split(1, 3), "control_hidden_states": split(1, 3)},
        },
        streams=("hidden_states",),
        whole=("blocks.*.attn2", "vace_blocks.*.attn2"),
    )
}
