"""Kandinsky 6: video and audio."""

from .building_blocks import FEED_FORWARD, FEW_INPUTS, FEW_OUTPUTS, ONE_ROW, SMALL_LINEAR
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at


def _attention(heads: str) -> dict[str, str]:
    return {
        "": f"local:num_heads={heads}",
        "to_query": f"column:{heads}",
        "to_key": f"column:{heads}",
        "to_value": f"column:{heads}",
        "query_norm": "head_norm",
        "key_norm": "head_norm",
        "out_layer": f"row:{heads}",
    }


def _decoder(heads: str) -> dict[str, str]:
    return {
        **at("self_attention", _attention(heads)),
        **at("cross_attention", _attention(heads)),
        **at("feed_forward", FEED_FORWARD),
        "visual_modulation.out_layer": "gather",
    }


def _text(heads: str) -> dict[str, str]:
    return {
        **at("attn", _attention(heads)),
        **at("feed_forward", FEED_FORWARD),
        "text_modulation.out_layer": "gather",
    }


def _embeddings(modality: str) -> dict[str, str]:
    return {
        f"{modality}_text_embeddings": SMALL_LINEAR,
        f"{modality}_time_embeddings": ONE_ROW,
        f"{modality}_pooled_text_embeddings": ONE_ROW,
    }


# The step's embedding is the sum of two modules' outputs, so the modulation is computed one by one.
TENSOR_PARALLEL_PLANS = {
    "Kandinsky6Transformer3DModel": TensorParallelPlan(
        {
            **at("video_text_transformer_blocks.*", _text("heads")),
            **at("audio_text_transformer_blocks.*", _text("audio")),
            **at("visual_transformer_blocks.*.video_dec_block", _decoder("heads")),
            **at("visual_transformer_blocks.*.audio_dec_block", _decoder("audio")),
            **at("visual_transformer_blocks.*.va_cross_attention", _attention("heads")),
            **at("visual_transformer_blocks.*.av_cross_attention", _attention("audio")),
            "visual_transformer_blocks.*.va_modulation.out_layer": "gather",
            "visual_transformer_blocks.*.av_modulation.out_layer": "gather",
            **_embeddings("video"),
            **_embeddings("audio"),
            "visual_embeddings": FEW_INPUTS,
            "audio_embeddings": FEW_INPUTS,
            "out_layer.modulation.out_layer": "gather",
            "out_layer.out_layer": FEW_OUTPUTS,
            "audio_out_layer.modulation.out_layer": "gather",
            "audio_out_layer.out_layer": FEW_OUTPUTS,
        },
        heads={
            "heads": (
                lambda config: config["model_dim"] // sum(config["axes_dims"]),
                lambda config: sum(config["axes_dims"]),
            ),
            "audio": (
                lambda config: (config["model_dim_a"] or config["model_dim"]) // _audio_head_dim(config),
                lambda config: _audio_head_dim(config),
            ),
        },
    )
}


def _audio_head_dim(config) -> int:
    return sum(config["axes_dims_a"] or config["axes_dims"])


# diffusers has none. The audio is short and stays whole, as the text does.
CONTEXT_PARALLEL_PLANS = {
    "Kandinsky6Transformer3DModel": ContextParallelPlan(
        {
            "visual_transformer_blocks.0": {"vis": split(1, 3)},
            "visual_transformer_blocks.*.video_dec_block.self_attention": {"rotary_emb": split(0, 5)},
            "visual_transformer_blocks.*.va_cross_attention": {"rope_q": split(0, 5)},
            "visual_transformer_blocks.*.av_cross_attention": {"rope_kv": split(0, 5)},
            "visual_transformer_blocks.-1": [gather(), None],
        },
        streams=("vis",),
        main="vis",
        whole=(
            "video_text_transformer_blocks.*.attn",
            "audio_text_transformer_blocks.*.attn",
            "visual_transformer_blocks.*.video_dec_block.cross_attention",
            "visual_transformer_blocks.*.audio_dec_block.self_attention",
            "visual_transformer_blocks.*.audio_dec_block.cross_attention",
            "visual_transformer_blocks.*.va_cross_attention",
        ),
        whole_queries=("visual_transformer_blocks.*.av_cross_attention",),
    )
}
