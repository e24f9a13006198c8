"""Wan Animate: Wan 2.2 led by a pose video and a face video."""

from .building_blocks import ATTENTION, FEW_INPUTS
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at
from .transformer_wan import WAN, WAN_SPLIT


TENSOR_PARALLEL_PLANS = {
    "WanAnimateTransformer3DModel": TensorParallelPlan(
        {
            **WAN,
            **at("face_adapter.*", {**ATTENTION, "to_kv?": "column:heads+heads", "to_out": "row:heads"}),
            "pose_patch_embedding": FEW_INPUTS,
            "motion_encoder": "replicate:convolutions over the face video",
            "face_encoder": "replicate:convolutions over time, of a few tokens a frame",
        }
    )
}

# diffusers has none. In the face adapters each frame attends to its own face: a rank's run of tokens need not begin
# with a frame, so they take the whole video, after one block in five.
CONTEXT_PARALLEL_PLANS = {
    "WanAnimateTransformer3DModel": ContextParallelPlan(
        {
            **{path: how for path, how in WAN_SPLIT.items() if path},
            "face_adapter.*": {"hidden_states": gather(stream="hidden_states"), 0: split(1, 3, output=True)},
        },
        streams=("hidden_states",),
        whole=("blocks.*.attn2", "face_adapter.*"),
    )
}
