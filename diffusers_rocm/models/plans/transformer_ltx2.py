"""LTX-2: video and audio, each in a stream of its own, that attend to each other."""

from .building_blocks import FEED_FORWARD
from .context_plan import ContextParallelPlan, Refused, gather, split
from .plan import TensorParallelPlan, at


def _attention(heads: str) -> dict[str, str]:
    """q and k are normalised, and rotated, across all heads; from 2.3 on each head has a gate."""
    return {
        "": f"local:heads={heads}",
        "to_q": f"column:{heads}",
        "to_k": f"column:{heads}",
        "to_v": f"column:{heads}",
        "norm_q": f"norm:{heads}",
        "norm_k": f"norm:{heads}",
        "to_gate_logits?": f"column:{heads}_gates",
        "to_out.0": f"row:{heads}",
    }


_ONE_ROW = "replicate:one row a step; its output is whole, for each token in image to video"
_FEW = "replicate:few channels; every rank needs the output"

TENSOR_PARALLEL_PLANS = {
    "LTX2VideoTransformer3DModel": TensorParallelPlan(
        {
            "rope": "output:heads",
            "audio_rope": "output:audio_heads",
            "cross_attn_rope": "output:audio_heads",
            "cross_attn_audio_rope": "output:audio_heads",
            **at("transformer_blocks.*.attn1", _attention("heads")),
            **at("transformer_blocks.*.attn2", _attention("heads")),
            **at("transformer_blocks.*.audio_attn1", _attention("audio_heads")),
            **at("transformer_blocks.*.audio_attn2", _attention("audio_heads")),
            **at("transformer_blocks.*.audio_to_video_attn", _attention("audio_heads")),
            **at("transformer_blocks.*.video_to_audio_attn", _attention("audio_heads")),
            **at("transformer_blocks.*.ff", FEED_FORWARD),
            **at("transformer_blocks.*.audio_ff", FEED_FORWARD),
            "proj_in": _FEW,
            "proj_out": _FEW,
            "audio_proj_in": _FEW,
            "audio_proj_out": _FEW,
            "caption_projection?": "replicate:two small Linears; every rank needs the output",
            "audio_caption_projection?": "replicate:two small Linears; every rank needs the output",
            "time_embed": _ONE_ROW,
            "audio_time_embed": _ONE_ROW,
            "av_cross_attn_video_scale_shift": _ONE_ROW,
            "av_cross_attn_audio_scale_shift": _ONE_ROW,
            "av_cross_attn_video_a2v_gate": _ONE_ROW,
            "av_cross_attn_audio_v2a_gate": _ONE_ROW,
            "prompt_adaln?": _ONE_ROW,
            "audio_prompt_adaln?": _ONE_ROW,
        },
        heads={
            "heads": ("num_attention_heads", "attention_head_dim"),
            "heads_gates": ("num_attention_heads", 1),
            "audio_heads": ("audio_num_attention_heads", "audio_attention_head_dim"),
            "audio_heads_gates": ("audio_num_attention_heads", 1),
        },
    )
}

# The video is split; text and audio, which is short, stay whole. diffusers' plan splits the text, to which audio
# attends too (huggingface/diffusers#14316).
_COORDINATES = {"coords": split(2, 4)}

CONTEXT_PARALLEL_PLANS = {
    "LTX2VideoTransformer3DModel": ContextParallelPlan(
        {
            "": {
                "hidden_states": split(1, 3),
                "timestep": split(1, 2),
                "video_keyframes_mask?": split(1, 3),
                "video_self_attention_mask?": Refused("its processor fits the mask to one rank's tokens"),
            },
            "rope": _COORDINATES,
            "cross_attn_rope": _COORDINATES,
            "proj_out": gather(),
        },
        streams=("hidden_states",),
        whole=(
            "transformer_blocks.*.attn2",
            "transformer_blocks.*.audio_attn1",
            "transformer_blocks.*.audio_attn2",
            "transformer_blocks.*.audio_to_video_attn",
        ),
        idle={"transformer_blocks.*.attn1": "all_perturbed"},
        whole_queries=("transformer_blocks.*.video_to_audio_attn",),
    )
}
