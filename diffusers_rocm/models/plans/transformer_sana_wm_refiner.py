"""The second stage of SANA-WM: LTX-2, which refines a block of frames after another and leaves audio out."""

from dataclasses import replace

from .context_plan import ContextParallelPlan, gather, split
from .transformer_ltx2 import TENSOR_PARALLEL_PLANS as LTX2_PLANS


# The same modules as LTX-2, those of audio included. A cache holds the keys of a rank's own heads.
_LTX2 = LTX2_PLANS["LTX2VideoTransformer3DModel"]
_TIME_EMBED = {"time_embed": "replicate:its output is whole, for each token"}

TENSOR_PARALLEL_PLANS = {"SanaWMLTX2RefinerTransformer3DModel": replace(_LTX2, rules={**_LTX2.rules, **_TIME_EMBED})}

_KEPT = tuple(f"captured_{each}_{when}" for each in "kv" for when in ("pre", "post"))

# diffusers has none. A cache has the keys of earlier frames, which come before those of the block, on every rank.
CONTEXT_PARALLEL_PLANS = {
    "SanaWMLTX2RefinerTransformer3DModel": ContextParallelPlan(
        {
            "": {
                "hidden_states": split(1, 3),
                "timestep": split(1, 2),
                "video_rotary_emb": split(-2, None),
            },
            "proj_out": gather(),
        },
        streams=("hidden_states",),
        whole=("transformer_blocks.*.attn2",),
        after_whole=True,
        kept={"transformer_blocks.*.attn1": ("kv_cache", _KEPT)},
    )
}
