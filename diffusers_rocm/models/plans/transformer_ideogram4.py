"""Ideogram 4: text and image come as one packed sequence."""

from .building_blocks import ATTENTION, ATTENTION_OUT, FEW_INPUTS, ONE_ROW
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at


TENSOR_PARALLEL_PLANS = {
    "Ideogram4Transformer2DModel": TensorParallelPlan(
        {
            **at("layers.*.attention", {**ATTENTION, **ATTENTION_OUT, "": "local:num_heads=heads"}),
            "layers.*.feed_forward.w1": "column:mlp",
            "layers.*.feed_forward.w3": "column:mlp",
            "layers.*.feed_forward.w2": "row:mlp",
            "layers.*.adaln_modulation": "modulation",
            "llm_cond_proj": "gather",
            "t_embedding": ONE_ROW,
            "adaln_proj": ONE_ROW,
            "input_proj": FEW_INPUTS,
            "embed_image_indicator": "replicate:two rows",
            "final_layer": "replicate:few output channels, and a row a step",
        },
        embedding="adaln_proj",
    )
}

# diffusers has none. Segments are compared with each other, for a mask of the whole sequence.
CONTEXT_PARALLEL_PLANS = {
    "Ideogram4Transformer2DModel": ContextParallelPlan(
        {
            "": {
                "hidden_states": split(1, 3),
                "encoder_hidden_states": split(1, 3),
                "position_ids": split(1, 3),
                "indicator": split(1, 2),
                "timestep": split(1, 2),
            },
            "final_layer": gather(),
        },
        streams=("hidden_states",),
    )
}
