"""Cosmos 1.0, Predict 2 and 2.5, Transfer 2.5 and its ControlNet."""

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

_BLOCK = {
    **at("attn1", ATTENTION | ATTENTION_OUT),
    **at("attn2", _CROSS_ATTENTION),
    **at("attn2", _IMAGE_ATTENTION, optional=True),
    **at("ff", FEED_FORWARD),
    # Modulation of low rank, for every token where frames have their own timesteps.
    **{f"norm{n}.linear_{index}": "gather" for n in (1, 2, 3) for index in (1, 2)},
}

_COMMON = {
    "time_embed.t_embedder.linear_1": "column:mlp",
    "time_embed.t_embedder.linear_2": "row:mlp",
    "crossattn_proj.0?": "gather",
    "img_context_proj.0?": "gather",
    "patch_embed": FEW_INPUTS,
    "learnable_pos_embed?": "replicate:added to the tokens, which every rank has",
}

TENSOR_PARALLEL_PLANS = {
    "CosmosTransformer3DModel": TensorParallelPlan(
        {
            **at("transformer_blocks.*", _BLOCK),
            **_COMMON,
            "norm_out.linear_1": "gather",
            "norm_out.linear_2": "gather",
            "proj_out": FEW_OUTPUTS,
        }
    ),
    "CosmosControlNetModel": TensorParallelPlan(
        {
            **at("control_blocks.*", _BLOCK),
            **_COMMON,
            "patch_embed_base": FEW_INPUTS,
            "control_blocks.0.before_proj": "gather",
            "control_blocks.*.after_proj": "gather",
        }
    ),
}

# diffusers has none. Frames may have their own timesteps, and the embedding then has a row for each token.
_PER_TOKEN = {"embedded_timestep": split(1, 3), "temb": split(1, 3)}
_POSITIONS = {
    "rope": {0: split(0, 2, output=True), 1: split(0, 2, output=True)},
    "learnable_pos_embed?": {0: split(1, 3, output=True)},
}

CONTEXT_PARALLEL_PLANS = {
    "CosmosTransformer3DModel": ContextParallelPlan(
        {
            **_POSITIONS,
            "transformer_blocks.0": {"hidden_states": split(1, 3)},
            "transformer_blocks.*": {**_PER_TOKEN, "controlnet_residual": split(1, 3)},
            "norm_out": _PER_TOKEN,
            "proj_out": gather(),
        },
        streams=("hidden_states",),
        whole=("transformer_blocks.*.attn2",),
    ),
    "CosmosControlNetModel": ContextParallelPlan(
        {
            **_POSITIONS,
            # To which the first block adds the latents.
            "control_blocks.0": {"hidden_states": split(1, 3), "latents": split(1, 3)},
            "control_blocks.*": _PER_TOKEN,
            "control_blocks.*.after_proj": gather(),
        },
        streams=("hidden_states",),
        whole=("control_blocks.*.attn2",),
    ),
}
