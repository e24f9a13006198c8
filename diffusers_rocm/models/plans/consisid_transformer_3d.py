"""ConsisID: CogVideoX that attends to a face."""

from .cogvideox_transformer_3d import COGVIDEOX
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at


def _attention(heads: str) -> dict[str, str]:
    return {
        "": f"local:heads={heads}",
        "to_q": f"column:{heads}",
        "to_kv": f"column:{heads}+{heads}",
        "to_out": f"row:{heads}",
    }


_MAPPINGS = [f"mapping_{scale}" for scale in range(5)] + ["id_embedding_mapping"]

TENSOR_PARALLEL_PLANS = {
    "ConsisIDTransformer3DModel": TensorParallelPlan(
        {
            **COGVIDEOX,
            **at("perceiver_cross_attention.*", _attention("cross"), optional=True),
            **at("local_facial_extractor.layers.*.0", _attention("face"), optional=True),
            "local_facial_extractor.layers.*.1.1?": "column:mlp",
            "local_facial_extractor.layers.*.1.3?": "row:mlp",
            **{
                f"local_facial_extractor.{name}?": "replicate:small Linears with norms between them"
                for name in _MAPPINGS
            },
        },
        heads={
            "heads": ("num_attention_heads", "attention_head_dim"),
            "cross": ("cross_attn_num_heads", "cross_attn_dim_head"),
            "face": ("LFE_num_heads", "LFE_dim_head"),
        },
        embedding="time_embedding",
    )
}

# diffusers has none. The face stays whole. After the blocks, the model joins text and video and cuts the text off.
CONTEXT_PARALLEL_PLANS = {
    "ConsisIDTransformer3DModel": ContextParallelPlan(
        {
            "": {"image_rotary_emb": split(0, 2)},
            "transformer_blocks.0": {"hidden_states": split(1, 3), "encoder_hidden_states": split(1, 3)},
            "transformer_blocks.-1": [gather(), gather(stream="encoder_hidden_states")],
        },
        whole=("perceiver_cross_attention.*?", "local_facial_extractor.layers.*.0?"),
    )
}
