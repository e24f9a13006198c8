"""Kandinsky 5: video and image."""

from .building_blocks import FEW_INPUTS, FEW_OUTPUTS, ONE_ROW, SMALL_LINEAR
from .context_plan import ContextParallelPlan, Refused, gather, split
from .plan import TensorParallelPlan, at


_ATTENTION = {
    "": "local:num_heads=heads",
    "to_query": "column:heads",
    "to_key": "column:heads",
    "to_value": "column:heads",
    "query_norm": "head_norm",
    "key_norm": "head_norm",
    "out_layer": "row:heads",
}
_FEED_FORWARD = {"in_layer": "column:mlp", "out_layer": "row:mlp"}

# The step's embedding is the sum of two modules' outputs, so the modulation is computed one by one.
TENSOR_PARALLEL_PLANS = {
    "Kandinsky5Transformer3DModel": TensorParallelPlan(
        {
            **at("text_transformer_blocks.*.self_attention", _ATTENTION),
            **at("text_transformer_blocks.*.feed_forward", _FEED_FORWARD),
            "text_transformer_blocks.*.text_modulation.out_layer": "gather",
            **at("visual_transformer_blocks.*.self_attention", _ATTENTION),
            **at("visual_transformer_blocks.*.cross_attention", _ATTENTION),
            **at("visual_transformer_blocks.*.feed_forward", _FEED_FORWARD),
            "visual_transformer_blocks.*.visual_modulation.out_layer": "gather",
            "out_layer.modulation.out_layer": "gather",
            "out_layer.out_layer": FEW_OUTPUTS,
            "text_embeddings": SMALL_LINEAR,
            "visual_embeddings": FEW_INPUTS,
            "time_embeddings": ONE_ROW,
            "pooled_text_embeddings": ONE_ROW,
        },
        heads={
            "heads": (
                lambda config: config["model_dim"] // sum(config["axes_dims"]),
                lambda config: sum(config["axes_dims"]),
            )
        },
    )
}

# diffusers has none. The text has its own blocks, and stays whole. The output's layer takes the video's shape.
CONTEXT_PARALLEL_PLANS = {
    "Kandinsky5Transformer3DModel": ContextParallelPlan(
        {
            "": {"sparse_params": Refused("sparse attention is laid out over the whole video")},
            "visual_transformer_blocks.0": {"visual_embed": split(1, 3)},
            "visual_transformer_blocks.*": {"rope": split(1, 6)},
            "visual_transformer_blocks.-1": gather(),
        },
        streams=("visual_embed",),
        main="visual_embed",
        whole=("text_transformer_blocks.*.self_attention", "visual_transformer_blocks.*.cross_attention"),
    )
}
