"""LongCat-AudioDiT."""

from .building_blocks import FEW_OUTPUTS
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan, at


_ATTENTION = {
    "": "local:heads=heads,inner_dim=heads",
    "to_q": "column:heads",
    "to_k": "column:heads",
    "to_v": "column:heads",
    "q_norm?": "norm:heads",
    "k_norm?": "norm:heads",
    "to_out.0": "row:heads",
}

_TWO_LINEARS = {"0": "column:mlp", "2": "row:mlp"}

TENSOR_PARALLEL_PLANS = {
    "LongCatAudioDiTTransformer": TensorParallelPlan(
        {
            **at("blocks.*.self_attn", _ATTENTION),
            **at("blocks.*.cross_attn", _ATTENTION, optional=True),
            **at("blocks.*.ffn.ff", {"0": "column:mlp", "3": "row:mlp"}),
            # One for all blocks, or one for each.
            "adaln_global_mlp.mlp.1?": "gather",
            "blocks.*.adaln_mlp.mlp.1?": "gather",
            "norm_out.linear": "gather",
            **at("time_embed.time_mlp", _TWO_LINEARS),
            **at("input_embed.proj", _TWO_LINEARS),
            **at("text_embed.proj", _TWO_LINEARS),
            **at("latent_embed.proj", _TWO_LINEARS, optional=True),
            **at("latent_cond_embedder.proj", _TWO_LINEARS, optional=True),
            # Between the two is a mean over all features.
            "text_conv_layer.*.pwconv1?": "gather",
            "text_conv_layer.*.pwconv2?": "gather",
            "proj_out": FEW_OUTPUTS,
        },
        heads={"heads": ("dit_heads", lambda config: config["dit_dim"] // config["dit_heads"])},
    )
}

# diffusers has none. What went into the blocks may be added to what comes out of them, where every rank has it.
CONTEXT_PARALLEL_PLANS = {
    "LongCatAudioDiTTransformer": ContextParallelPlan(
        {
            "blocks.0": {"hidden_states": split(1, 3)},
            "blocks.*": {"rope": split(0, 2), "mask": split(1, 2)},
            "blocks.-1": gather(),
        },
        streams=("hidden_states",),
        whole=("blocks.*.cross_attn?",),
    )
}
