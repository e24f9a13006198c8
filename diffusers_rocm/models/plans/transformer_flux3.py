"""FLUX.3."""

from .building_blocks import ATTENTION, ATTENTION_OUT, FEW_INPUTS, FEW_OUTPUTS, ONE_ROW
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at


# Attention and feed-forward side by side; gates and values in one projection.
_BLOCK = {**at("attn", ATTENTION | ATTENTION_OUT), "ff.linear_in": "column:mlp+mlp", "ff.linear_out": "row:mlp"}

TENSOR_PARALLEL_PLANS = {
    "Flux3Transformer2DModel": TensorParallelPlan(
        {
            **at("mode_blocks.*.*", _BLOCK),
            **at("txt_mode_blocks.*", _BLOCK),
            **at("single_transformer_blocks.*", _BLOCK),
            # Of each token, once a step.
            "early_stream_modulations.*.linear": "gather",
            "single_stream_modulations.*.linear": "gather",
            "norm_out.linear": "gather",
            "context_embedder": "gather",
            "x_embedders.*": FEW_INPUTS,
            "timestep_embedder": ONE_ROW,
            "target_timestep_embedder?": ONE_ROW,
            "proj_out": FEW_OUTPUTS,
        }
    )
}

# diffusers has none. Text, image and reference pictures are by themselves first.
CONTEXT_PARALLEL_PLANS = {
    "Flux3Transformer2DModel": ContextParallelPlan(
        {
            "": {
                "hidden_states": split(1, 3),
                "encoder_hidden_states": split(1, 3),
                "image_cond_hidden_states": split(1, 3),
                "img_ids": split(0, 2),
                "txt_ids": split(0, 2),
                "image_cond_ids": split(0, 2),
            },
            "proj_out": gather(),
        },
        streams=("encoder_hidden_states", "hidden_states", "image_cond_hidden_states"),
        alone={
            "txt_mode_blocks.*.attn": "encoder_hidden_states",
            "mode_blocks.image_cond.*.attn": "image_cond_hidden_states",
        },
    )
}
