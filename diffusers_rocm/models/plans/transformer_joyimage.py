"""JoyImage-Edit: pictures are frames of one sequence."""

from .building_blocks import FEED_FORWARD, FEW_INPUTS, FEW_OUTPUTS, ONE_ROW
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at


_BLOCK = {
    "attn": "local:heads=heads",
    "attn.img_attn_qkv": "column:heads+heads+heads",
    "attn.txt_attn_qkv": "column:heads+heads+heads",
    "attn.img_attn_q_norm": "head_norm",
    "attn.img_attn_k_norm": "head_norm",
    "attn.txt_attn_q_norm": "head_norm",
    "attn.txt_attn_k_norm": "head_norm",
    "attn.img_attn_proj": "row:heads",
    "attn.txt_attn_proj": "row:heads",
    **at("img_mlp", FEED_FORWARD),
    **at("txt_mlp", FEED_FORWARD),
}

JOYIMAGE = TensorParallelPlan(
    {
        **at("double_blocks.*", _BLOCK),
        "condition_embedder.time_proj": "gather",
        "condition_embedder.text_embedder.linear_1": "column:mlp",
        "condition_embedder.text_embedder.linear_2": "row:mlp",
        "condition_embedder.time_embedder": ONE_ROW,
        "img_in": FEW_INPUTS,
        "proj_out": FEW_OUTPUTS,
    },
    heads={"heads": ("num_attention_heads", lambda config: config["hidden_size"] // config["num_attention_heads"])},
)
TENSOR_PARALLEL_PLANS = {"JoyImageEditTransformer3DModel": JOYIMAGE}

# diffusers has none. No module makes the rotary embeddings, so they are split where they are taken: the image's and,
# if it has any, the text's.
CONTEXT_PARALLEL_PLANS = {
    "JoyImageEditTransformer3DModel": ContextParallelPlan(
        {
            "double_blocks.0": {"hidden_states": split(1, 3), "encoder_hidden_states": split(1, 3)},
            "double_blocks.*": {"image_rotary_emb": split(0, 2)},
            "proj_out": gather(),
        },
        streams=("hidden_states", "encoder_hidden_states"),
    )
}
