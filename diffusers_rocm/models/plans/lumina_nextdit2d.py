"""Lumina-Next."""

import math
from collections.abc import Mapping
from typing import Any

from .building_blocks import FEW_INPUTS, FEW_OUTPUTS, ONE_ROW
from .context_plan import ByTokens, ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at


# q and k are normalised across all heads. Both attentions end in the output projection of the second.
_ATTENTION = {
    "": "local:heads=heads",
    "to_q": "column:heads",
    "to_k": "column:keys",
    "to_v": "column:keys",
    "norm_q?": "norm:heads",
    "norm_k?": "norm:keys",
}


def _key_heads(config: Mapping[str, Any]) -> int:
    return config["num_kv_heads"] or config["num_attention_heads"]


TENSOR_PARALLEL_PLANS = {
    "LuminaNextDiT2DModel": TensorParallelPlan(
        {
            "layers.*": "slices:gate=0/heads",
            **at("layers.*.attn1", _ATTENTION),
            **at("layers.*.attn2", {**_ATTENTION, "to_out.0": "row:heads"}),
            "layers.*.feed_forward.linear_1": "column:mlp",
            "layers.*.feed_forward.linear_3": "column:mlp",
            "layers.*.feed_forward.linear_2": "row:mlp",
            "layers.*.norm1.linear": "modulation",
            "norm_out.linear_1": "modulation",
            "norm_out.linear_2": FEW_OUTPUTS,
            "patch_embedder": FEW_INPUTS,
            "time_caption_embed": ONE_ROW,
        },
        heads={
            "heads": (_key_heads, lambda config: config["hidden_size"] // _key_heads(config)),
            "keys": (_key_heads, lambda config: config["hidden_size"] // config["num_attention_heads"]),
        },
        embedding="time_caption_embed",
    )
}


def _of_all_tokens(kwargs: dict[str, Any] | None, total: int, start: int, stop: int) -> dict[str, Any] | None:
    """Proportional attention: its scale is a logarithm of the tokens, which the processor counts here."""
    if not kwargs or kwargs.get("base_sequence_length") is None:
        return kwargs
    base = kwargs["base_sequence_length"] ** (math.log(stop - start) / math.log(total))
    return {**kwargs, "base_sequence_length": base}


# diffusers has none. The text stays whole, and attention to it (attn2) needs no communication. The mask of the image
# hides nothing; it stays whole too.
CONTEXT_PARALLEL_PLANS = {
    "LuminaNextDiT2DModel": ContextParallelPlan(
        {
            "patch_embedder": {3: split(1, 3, output=True)},
            "layers.0": {"hidden_states": split(1, 3)},
            "layers.*": {"cross_attention_kwargs": ByTokens(_of_all_tokens)},
            "norm_out": gather(),
        },
        streams=("hidden_states",),
        whole=("layers.*.attn2",),
    )
}
