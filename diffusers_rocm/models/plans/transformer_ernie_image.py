"""ERNIE-Image. Its tokens are dim 0."""

from .building_blocks import ATTENTION, ATTENTION_OUT, FEW_INPUTS, FEW_OUTPUTS, ONE_ROW, SMALL_LINEAR
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at


TENSOR_PARALLEL_PLANS = {
    "ErnieImageTransformer2DModel": TensorParallelPlan(
        {
            **at("layers.*.self_attention", ATTENTION | ATTENTION_OUT),
            "layers.*.mlp.gate_proj": "column:mlp",
            "layers.*.mlp.up_proj": "column:mlp",
            "layers.*.mlp.linear_fc2": "row:mlp",
            "adaLN_modulation.1": "gather",
            "final_norm.linear": "gather",
            "text_proj?": SMALL_LINEAR,
            "time_embedding": ONE_ROW,
            "x_embedder": FEW_INPUTS,
            "final_linear": FEW_OUTPUTS,
        },
        heads={
            "heads": ("num_attention_heads", lambda config: config["hidden_size"] // config["num_attention_heads"])
        },
    )
}

# diffusers has none. The model joins the sequence itself, with a mask for all of it, and modulates each token.
CONTEXT_PARALLEL_PLANS = {
    "ErnieImageTransformer2DModel": ContextParallelPlan(
        {
            "pos_embed": {0: split(1, 4, output=True)},
            "layers.0": {"x": split(0, 3)},
            "layers.*": {"temb": split(0, 3)},
            "final_linear": gather(0),
        },
        streams=("x",),
        main="x",
    )
}
