"""PRX: the image asks, text and image answer."""

from .building_blocks import FEW_INPUTS, FEW_OUTPUTS, ONE_ROW, SMALL_LINEAR
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at


_ATTENTION = {
    "": "local:heads=heads",
    "img_qkv_proj": "column:heads+heads+heads",
    "txt_kv_proj": "column:heads+heads",
    "norm_q": "head_norm",
    "norm_k": "head_norm",
    "norm_added_k": "head_norm",
    "to_out.0": "row:heads",
}

TENSOR_PARALLEL_PLANS = {
    "PRXTransformer2DModel": TensorParallelPlan(
        {
            **at("blocks.*.attention", _ATTENTION),
            "blocks.*.gate_proj": "column:mlp",
            "blocks.*.up_proj": "column:mlp",
            "blocks.*.down_proj": "row:mlp",
            "blocks.*.modulation.lin": "modulation",
            "final_layer.adaLN_modulation.1": "modulation",
            "final_layer.linear": FEW_OUTPUTS,
            "img_in": FEW_INPUTS,
            "txt_in": SMALL_LINEAR,
            "time_in": ONE_ROW,
            "resolution_embedder?": ONE_ROW,
        },
        heads={"heads": ("num_heads", lambda config: config["hidden_size"] // config["num_heads"])},
        # With the resolution their input is a sum of two embeddings, which no module makes.
        embedding=lambda config: None if config.get("resolution_embeds") else "time_in",
    )
}

# diffusers has none. The text is never changed, and every block takes it anew: so it is split where it comes in.
CONTEXT_PARALLEL_PLANS = {
    "PRXTransformer2DModel": ContextParallelPlan(
        {
            "": {"encoder_hidden_states": split(1, 3), "attention_mask": split(1, 2)},
            "pe_embedder": {0: split(2, 6, output=True)},
            "blocks.0": {"hidden_states": split(1, 3)},
            "final_layer": gather(),
        },
        main_asks=("blocks.*.attention",),
    )
}
