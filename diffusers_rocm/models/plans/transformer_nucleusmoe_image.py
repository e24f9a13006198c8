"""Nucleus-Image: a mixture of experts that choose their tokens; the image asks, image and text answer."""

from collections.abc import Mapping
from typing import Any

from .building_blocks import FEW_INPUTS, FEW_OUTPUTS, GATED_FEED_FORWARD, ONE_ROW
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at


_ATTENTION = {
    "": "local:heads=heads,inner_dim=heads,inner_kv_dim=keys",
    "to_q": "column:heads",
    "to_k": "column:keys",
    "to_v": "column:keys",
    "add_k_proj": "column:keys",
    "add_v_proj": "column:keys",
    "norm_q?": "head_norm",
    "norm_k?": "head_norm",
    "norm_added_k?": "head_norm",
    "to_out.0": "row:heads",
}

# Each expert is split, so every rank has as much to do.
_EXPERTS = {
    "gate": "replicate:the router: a row for each expert",
    "experts": "partial:gate_up_proj=2/mlp+mlp,down_proj=1/mlp",
    **at("shared_expert", GATED_FEED_FORWARD),
}


def _key_heads(config: Mapping[str, Any]) -> int:
    return config["num_key_value_heads"] or config["num_attention_heads"]


TENSOR_PARALLEL_PLANS = {
    "NucleusMoEImageTransformer2DModel": TensorParallelPlan(
        {
            **at("transformer_blocks.*.attn", _ATTENTION),
            **at("transformer_blocks.*.img_mlp", GATED_FEED_FORWARD | _EXPERTS, optional=True),
            "transformer_blocks.*.img_mod.1": "modulation",
            "transformer_blocks.*.encoder_proj": "gather",
            "norm_out.linear": "modulation",
            "time_text_embed": ONE_ROW,
            "img_in": FEW_INPUTS,
            "proj_out": FEW_OUTPUTS,
        },
        heads={
            "heads": (
                _key_heads,
                lambda config: config["num_attention_heads"] // _key_heads(config) * config["attention_head_dim"],
            ),
            "keys": (_key_heads, "attention_head_dim"),
        },
        embedding="time_text_embed",
    )
}

# diffusers has none. The text is never changed, and every block takes it anew. The mask is of the whole sequence.
CONTEXT_PARALLEL_PLANS = {
    "NucleusMoEImageTransformer2DModel": ContextParallelPlan(
        {
            "pos_embed": {0: split(0, 2, output=True), 1: split(0, 2, output=True)},
            "transformer_blocks.0": {"hidden_states": split(1, 3)},
            "transformer_blocks.*": {"encoder_hidden_states": split(1, 3)},
            "proj_out": gather(),
        },
        streams=("hidden_states", "encoder_hidden_states"),
        main_asks=("transformer_blocks.*.attn",),
        impossible={
            "transformer_blocks.*.img_mlp.experts": "each expert chooses its tokens among all of the image's, so the "
            "choice among a part of them is another"
        },
    )
}
