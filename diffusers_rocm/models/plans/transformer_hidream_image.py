"""HiDream-I1: a mixture of experts. E1 is the same class."""

from .building_blocks import FEW_INPUTS, FEW_OUTPUTS, ONE_ROW
from .context_plan import ContextParallelPlan, gather, split, split_leading
from .plan import TensorParallelPlan, at


# q and k are normalised across all heads.
_ATTENTION = {
    "": "local:heads=heads",
    "to_q": "column:heads",
    "to_k": "column:heads",
    "to_v": "column:heads",
    "q_rms_norm": "norm:heads",
    "k_rms_norm": "norm:heads",
    "to_out": "row:heads",
}

_TEXT_ATTENTION = {
    "to_q_t": "column:heads",
    "to_k_t": "column:heads",
    "to_v_t": "column:heads",
    "q_rms_norm_t": "norm:heads",
    "k_rms_norm_t": "norm:heads",
    "to_out_t": "row:heads",
}

_FEED_FORWARD = {"w1": "column:mlp", "w3": "column:mlp", "w2": "row:mlp"}

# Each expert is split, so every rank has as much to do, whichever experts are chosen; with no experts, there is one.
_BLOCK = {
    **at("attn1", _ATTENTION),
    **at("ff_i", _FEED_FORWARD, optional=True),
    **at("ff_i.experts.*", _FEED_FORWARD, optional=True),
    **at("ff_i.shared_experts", _FEED_FORWARD, optional=True),
    "ff_i.gate?": "replicate:the router: a row for each expert",
    "adaLN_modulation.1": "modulation",
}

TENSOR_PARALLEL_PLANS = {
    "HiDreamImageTransformer2DModel": TensorParallelPlan(
        {
            **at(
                "double_stream_blocks.*.block", {**_BLOCK, **at("attn1", _TEXT_ATTENTION), **at("ff_t", _FEED_FORWARD)}
            ),
            **at("single_stream_blocks.*.block", _BLOCK),
            "caption_projection.*.linear": "gather",
            "final_layer.adaLN_modulation.1": "modulation",
            "final_layer.linear": FEW_OUTPUTS,
            "x_embedder": FEW_INPUTS,
            "t_embedder": ONE_ROW,
            "p_embedder": ONE_ROW,
        },
        # No module makes the sum of the two embeddings.
        embedding="double_stream_blocks.0.block.adaLN_modulation.0",
        activated=True,
    )
}

# diffusers has none. Every block takes the text, and with it one more layer of Llama: [image | T5, Llama | Llama].
# All text has the same position, and where its ids are made it is split already.
_IMAGE_IS_WHOLE = {"hidden_states_masks": split_leading(1)}

CONTEXT_PARALLEL_PLANS = {
    "HiDreamImageTransformer2DModel": ContextParallelPlan(
        {
            "": {"encoder_hidden_states_t5": split(-2, 3), "encoder_hidden_states_llama3": split(-2, 4)},
            "x_embedder": {"latent": split(1, 3)},
            "pe_embedder": {"ids": split_leading(1)},
            "double_stream_blocks.*": _IMAGE_IS_WHOLE,
            "single_stream_blocks.*": _IMAGE_IS_WHOLE,
            "final_layer": gather(),
        },
        streams=(
            "latent",
            "encoder_hidden_states_t5",
            "encoder_hidden_states_llama3",
            "encoder_hidden_states_llama3",
        ),
        main="latent",
    )
}
