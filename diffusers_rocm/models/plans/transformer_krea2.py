"""Krea 2."""

from .building_blocks import FEW_INPUTS, FEW_OUTPUTS, ONE_ROW
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at


def _attention(heads: str, keys: str) -> dict[str, str]:
    return {
        "": f"local:num_heads={heads},num_kv_heads={keys}",
        "to_q": f"column:{heads}",
        "to_k": f"column:{keys}",
        "to_v": f"column:{keys}",
        "to_gate": f"column:{heads}",
        "norm_q": "head_norm",
        "norm_k": "head_norm",
        "to_out.0": f"row:{heads}",
    }


_FEED_FORWARD = {"gate": "column:mlp", "up": "column:mlp", "down": "row:mlp"}
_TEXT_BLOCK = {**at("attn", _attention("text_heads", "text_keys")), **at("ff", _FEED_FORWARD)}


def _of_group(config: dict) -> int:
    return config["attention_head_dim"] * config["num_attention_heads"] // config["num_key_value_heads"]


def _of_text_head(config: dict) -> int:
    return config["text_hidden_dim"] // config["text_num_attention_heads"]


def _of_text_group(config: dict) -> int:
    return config["text_hidden_dim"] // config["text_num_key_value_heads"]


TENSOR_PARALLEL_PLANS = {
    "Krea2Transformer2DModel": TensorParallelPlan(
        {
            **at("transformer_blocks.*.attn", _attention("heads", "keys")),
            **at("transformer_blocks.*.ff", _FEED_FORWARD),
            **at("text_fusion.layerwise_blocks.*", _TEXT_BLOCK),
            **at("text_fusion.refiner_blocks.*", _TEXT_BLOCK),
            "text_fusion.projector": "replicate:a weight for each layer of the text encoder",
            "time_mod_proj": "gather",
            "txt_in.linear_1": "column:mlp",
            "txt_in.linear_2": "row:mlp",
            "time_embed": ONE_ROW,
            "img_in": FEW_INPUTS,
            "final_layer": FEW_OUTPUTS,
        },
        heads={
            "heads": ("num_key_value_heads", _of_group),
            "keys": ("num_key_value_heads", "attention_head_dim"),
            "text_heads": ("text_num_key_value_heads", _of_text_group),
            "text_keys": ("text_num_key_value_heads", _of_text_head),
        },
    )
}

# diffusers has none. The text is fused whole; the model joins the sequence itself, and takes the image from the end.
CONTEXT_PARALLEL_PLANS = {
    "Krea2Transformer2DModel": ContextParallelPlan(
        {
            "rotary_emb": {0: split(0, 2, output=True), 1: split(0, 2, output=True)},
            "transformer_blocks.0": {"hidden_states": split(1, 3)},
            "transformer_blocks.-1": gather(),
        },
        streams=("hidden_states",),
        whole=("text_fusion.layerwise_blocks.*.attn", "text_fusion.refiner_blocks.*.attn"),
    )
}
