"""Cosmos 1.0, Predict 2 and 2.5, Transfer 2.5."""

from .building_blocks import ATTENTION, ATTENTION_OUT, FEED_FORWARD, FEW_INPUTS, FEW_OUTPUTS
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at


# Attention to the text, and to an image beside it.
_CROSS_ATTENTION = {**ATTENTION, **ATTENTION_OUT, "": "local:heads=heads,out_dim=heads"}
_IMAGE_ATTENTION = {
    "q_img": "column:heads",
    "k_img": "column:heads",
    "v_img": "column:heads",
    "q_img_norm": "head_norm",
    "k_img_norm": "head_norm",
}

TENSOR_PARALLEL_PLANS = {
    "CosmosTransformer3DModel": TensorParallelPlan(
        {
            **at("transformer_blocks.*.attn1", ATTENTION | ATTENTION_OUT),
            **at("transformer_blocks.*.attn2", _CROSS_ATTENTION),
            **at("transformer_blocks.*.attn2", _IMAGE_ATTENTION, optional=True),
            **at("transformer_blocks.*.ff", FEED_FORWARD),
            # Modulation of low rank, for every token where frames have their own timesteps.
            **{
                f"{norm}.linear_{index}": "gather"
                for norm in (*(f"transformer_blocks.*.norm{n}" for n in (1, 2, 3)), "norm_out")
                for index in (1, 2)
            },
            "time_embed.t_embedder.linear_1": "column:mlp",
            "time_embed.t_embedder.linear_2": "row:mlp",
            "crossattn_proj.0?": "gather",
            "img_context_proj.0?": "gather",
            "patch_embed": FEW_INPUTS,
            "learnable_pos_embed?": "replicate:added to the tokens, which every rank has",
            "proj_out": FEW_OUTPUTS,
        }
    )
}

# diffusers has none. Frames may have their own timesteps, and the embedding then has a row for each token.
_PER_TOKEN = {"embedded_timestep": split(1, 3), "temb": split(1, 3)}

CONTEXT_PARALLEL_PLANS = {
    "CosmosTransformer3DModel": ContextParallelPlan(
        {
            "rope": {0: split(0, 2, output=True), 1: split(0, 2, output=True)},
            "learnable_pos_embed?": {0: split(1, 3, output=True)},
            "transformer_blocks.0": {"hidden_states": split(1, 3)},
            "transformer_blocks.*": {**_PER_TOKEN, "controlnet_residual": split(1, 3)},
            "norm_out": _PER_TOKEN,
            "proj_out": gather(),
        },
        streams=("hidden_states",),
        whole=("transformer_blocks.*.attn2",),
    )
}
