"""OmniGen: text, pictures and noise in one sequence."""

from .building_blocks import ATTENTION, ATTENTION_OUT, FEW_OUTPUTS, ONE_ROW
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at


TENSOR_PARALLEL_PLANS = {
    "OmniGenTransformer2DModel": TensorParallelPlan(
        {
            # The processor joins its heads by out_dim. It does not repeat keys: every query head has its own.
            **at("layers.*.self_attn", {**ATTENTION, **ATTENTION_OUT, "": "local:heads=heads,out_dim=heads"}),
            "layers.*.mlp.gate_up_proj": "column:mlp+mlp",
            "layers.*.mlp.down_proj": "row:mlp",
            "norm_out.linear": "gather",
            "embed_tokens": "embedding",
            "patch_embedding": "replicate:few input channels, and a table of positions",
            "time_token": ONE_ROW,
            "t_embedder": ONE_ROW,
            "proj_out": FEW_OUTPUTS,
        },
        heads={
            "heads": ("num_attention_heads", lambda config: config["hidden_size"] // config["num_attention_heads"])
        },
    )
}

# diffusers has none. The model joins the sequence itself, with a mask for all of it.
CONTEXT_PARALLEL_PLANS = {
    "OmniGenTransformer2DModel": ContextParallelPlan(
        {
            "rope": {0: split(0, 2, output=True), 1: split(0, 2, output=True)},
            "layers.0": {"hidden_states": split(1, 3)},
            "norm": gather(),
        },
        streams=("hidden_states",),
    )
}
