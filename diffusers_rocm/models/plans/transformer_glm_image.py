"""GLM-Image."""

from typing import Any

from .building_blocks import ATTENTION, ATTENTION_OUT, FEED_FORWARD, FEW_INPUTS, FEW_OUTPUTS, ONE_ROW
from .context_plan import ContextParallelPlan, Refused, gather, split
from .plan import TensorParallelPlan, at


TENSOR_PARALLEL_PLANS = {
    "GlmImageTransformer2DModel": TensorParallelPlan(
        {
            **at("transformer_blocks.*.attn1", ATTENTION | ATTENTION_OUT),
            **at("transformer_blocks.*.ff", FEED_FORWARD),
            **at("glyph_projector", FEED_FORWARD),
            **at("prior_projector", FEED_FORWARD),
            "transformer_blocks.*.norm1.linear": "modulation",
            "norm_out.linear": "modulation",
            "prior_token_embedding": "embedding",
            "time_condition_embed": ONE_ROW,
            "image_projector": FEW_INPUTS,
            "proj_out": FEW_OUTPUTS,
        },
        embedding="time_condition_embed",
        activated=True,
    )
}


def _keeps(caches: Any) -> bool:
    return any(cache.mode in ("write", "read") for cache in caches.caches)


# diffusers has none.
CONTEXT_PARALLEL_PLANS = {
    "GlmImageTransformer2DModel": ContextParallelPlan(
        {
            "": {
                "image_rotary_emb": split(0, 2),
                "attention_mask": Refused("its processor makes a mask of one rank's queries and keys of it"),
                "kv_caches": Refused("the keys that were kept of a picture are not split", _keeps),
            },
            "rope": {0: split(0, 2, output=True), 1: split(0, 2, output=True)},
            "transformer_blocks.0": {"hidden_states": split(1, 3), "encoder_hidden_states": split(1, 3)},
            "proj_out": gather(),
        }
    )
}
