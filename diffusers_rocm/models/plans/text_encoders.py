"""The text encoders of diffusers' pipelines, which are models of transformers.

Their attention views its heads by their size, whatever their number; the rules of decoders are those of transformers'
own `base_model_tp_plan`, where it has one, and say besides what becomes of the tables of words.
"""

from typing import Any

from .plan import TensorParallelPlan, at


_T5 = TensorParallelPlan(
    {
        **at(
            "encoder.block.*.layer.0.SelfAttention",
            {
                "": "local:n_heads=heads,inner_dim=heads",
                "q": "column:heads",
                "k": "column:heads",
                "v": "column:heads",
                "o": "row:heads",
                "relative_attention_bias?": "slices:weight=1/heads",  # a column for each head
            },
        ),
        **at(
            "encoder.block.*.layer.1.DenseReluDense",
            {"wi?": "column:mlp", "wi_0?": "column:mlp", "wi_1?": "column:mlp", "wo": "row:mlp"},
        ),
        "shared": "replicate:words, by two names",
    },
    heads={"heads": (lambda config: config.num_heads, lambda config: config.d_kv)},
)

_CLIP_LAYER = {
    **at("self_attn", {"q_proj": "column:heads", "k_proj": "column:heads", "v_proj": "column:heads"}),
    "self_attn.out_proj": "row:heads",
    "mlp.fc1": "column:mlp",
    "mlp.fc2": "row:mlp",
}


_CLIP = TensorParallelPlan(
    {
        **at("encoder.layers.*", _CLIP_LAYER, optional=True),
        **at("text_model.encoder.layers.*", _CLIP_LAYER, optional=True),
        "text_projection?": "replicate:one small Linear; every rank needs the output",
    },
    heads={
        "heads": (
            lambda config: config.num_attention_heads,
            lambda config: config.hidden_size // config.num_attention_heads,
        )
    },
)

_DECODER_LAYER = {
    "self_attn.q_proj": "column:heads",
    "self_attn.k_proj": "column:kv",
    "self_attn.v_proj": "column:kv",
    "self_attn.o_proj": "row:heads",
    "mlp.gate_proj?": "column:mlp",
    "mlp.up_proj?": "column:mlp",
    "mlp.gate_up_proj?": "column:mlp+mlp",
    "mlp.down_proj": "row:mlp",
}


def _text(config: Any) -> Any:
    """The config of the decoder; T5Gemma's encoder is one too, but for its mask."""
    return getattr(config, "encoder", None) or config.get_text_config()


def _key_heads(config: Any) -> int:
    return _text(config).num_key_value_heads


def _head_dim(config: Any) -> int:
    text = _text(config)
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def _group_dim(config: Any) -> int:
    """Of the queries that share a key and a value."""
    return _text(config).num_attention_heads // _key_heads(config) * _head_dim(config)


def _decoder(path: str, words: str = "embedding") -> TensorParallelPlan:
    return TensorParallelPlan(
        {**at(f"{path}layers.*", _DECODER_LAYER), f"{path}embed_tokens": words, "lm_head?": "gather"},
        heads={"heads": (_key_heads, _group_dim), "kv": (_key_heads, _head_dim)},
    )


_SCALED = "replicate:words, scaled as they are looked up"

TEXT_ENCODER_PLANS = {
    "CLIPTextModel": _CLIP,
    "CLIPTextModelWithProjection": _CLIP,
    "Gemma2Model": _decoder("", _SCALED),
    "Gemma3ForConditionalGeneration": _decoder("model.language_model.", _SCALED),
    "GemmaModel": _decoder("", _SCALED),
    "GlmModel": _decoder(""),
    "LlamaForCausalLM": _decoder("model."),
    "LlamaModel": _decoder(""),
    "LlavaForConditionalGeneration": _decoder("model.language_model."),
    "Mistral3ForConditionalGeneration": _decoder("model.language_model."),
    "Mistral3Model": _decoder("language_model."),
    "Qwen2VLForConditionalGeneration": _decoder("model.language_model."),
    "Qwen2_5_VLForConditionalGeneration": _decoder("model.language_model."),
    "Qwen2_5_VLTextModel": _decoder(""),
    "Qwen3ForCausalLM": _decoder("model."),
    "Qwen3Model": _decoder(""),
    "Qwen3VLForConditionalGeneration": _decoder("model.language_model."),
    "Qwen3VLModel": _decoder("language_model."),
    "SmolLM3ForCausalLM": _decoder("model."),
    "T5EncoderModel": _T5,
    "T5GemmaEncoderModel": _decoder("encoder."),
    "UMT5EncoderModel": _T5,
}
