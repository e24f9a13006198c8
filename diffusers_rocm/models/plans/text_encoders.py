"""The text encoders of diffusers' pipelines, which are models of transformers.

Their attention views its heads by their size, whatever their number; the rules of decoders are those of transformers'
own `base_model_tp_plan`, where it has one, and say besides what becomes of the tables of words.
"""

from collections.abc import Callable
from typing import Any

from .building_blocks import SMALL_LINEAR
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
        "text_projection?": SMALL_LINEAR,
    },
    heads={
        "heads": (
            lambda config: config.num_attention_heads,
            lambda config: config.hidden_size // config.num_attention_heads,
        )
    },
)

_DECODER_MLP = {
    "gate_proj?": "column:mlp",
    "up_proj?": "column:mlp",
    "gate_up_proj?": "column:mlp+mlp",
    "down_proj": "row:mlp",
}


def _text(config: Any) -> Any:
    """The config of the decoder; T5Gemma's encoder is one too, but for its mask."""
    return getattr(config, "encoder", None) or config.get_text_config()


def _decoder(path: str, words: str = "embedding") -> Callable[[Any], TensorParallelPlan]:
    """By the model's config: Gemma 4's layers are of two kinds, with heads of their own number and size each."""

    def plan(config: Any) -> TensorParallelPlan:
        text, rules, heads = _text(config), {f"{path}embed_tokens": words, "lm_head?": "gather"}, {}
        by_layer = getattr(text, "per_layer_config", [text] * text.num_hidden_layers)  # transformers 4 has none
        for index in range(text.num_hidden_layers):
            layer = by_layer[index]
            keys, queries = layer.num_key_value_heads, text.num_attention_heads
            dim = getattr(layer, "head_dim", None) or text.hidden_size // queries
            kind = f"{keys}x{dim}"
            if keys == 1:  # which all queries share
                heads[f"heads_{kind}"] = queries, dim
                of_keys, shared = "replicate:one head", {"": f"local:num_key_value_groups=heads_{kind}"}
            else:
                heads[f"heads_{kind}"], heads[f"keys_{kind}"] = (keys, queries // keys * dim), (keys, dim)
                of_keys, shared = f"column:keys_{kind}", {}
            attention = {
                "q_proj": f"column:heads_{kind}",
                "k_proj?": of_keys,  # in Gemma 4 later layers may attend to the keys of earlier ones,
                "v_proj?": of_keys,  # and keys may be values as well
                "o_proj": f"row:heads_{kind}",
            }
            rules |= at(f"{path}layers.{index}.self_attn", attention | shared)
            rules |= at(f"{path}layers.{index}.mlp", _DECODER_MLP)
        return TensorParallelPlan(rules, heads)

    return plan


_SCALED = "replicate:words, scaled as they are looked up"

# Class -> its plan, or what makes it of the config.
TEXT_ENCODER_PLANS: dict[str, TensorParallelPlan | Callable[[Any], TensorParallelPlan]] = {
    "CLIPTextModel": _CLIP,
    "CLIPTextModelWithProjection": _CLIP,
    "Gemma2Model": _decoder("", _SCALED),
    "Gemma3ForConditionalGeneration": _decoder("model.language_model.", _SCALED),
    "Gemma4UnifiedForConditionalGeneration": _decoder("model.language_model.", _SCALED),
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
    "T5Gemma2Encoder": _decoder("text_model.", _SCALED),
    "T5GemmaEncoderModel": _decoder("encoder."),
    "UMT5EncoderModel": _T5,
}
