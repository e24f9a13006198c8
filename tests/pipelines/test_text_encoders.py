"""Text encoders on the ranks that share a picture: sharded, on the first rank alone, or whole on each."""

import json
import re
import tempfile
import unittest
from pathlib import Path
from typing import Any

import torch
import transformers
from parameterized import parameterized
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from diffusers_rocm.distributed.axis import Axis
from diffusers_rocm.loaders.text_encoder import load_sharded_text_encoder
from diffusers_rocm.loaders.whole import load_whole
from diffusers_rocm.models.plans.text_encoders import TEXT_ENCODER_PLANS

from ..loaders.testing_utils import elements_read
from ..models.testing_utils.parallelism import FLOAT32_BAR
from ..testing_utils import message_of, relative_l2, run_ranks


CPU = torch.device("cpu")
# Three groups of key heads for two queries each, or six heads; a feed-forward that two and three do not divide alike.
DECODER = {
    "hidden_size": 48,
    "intermediate_size": 70,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": 99,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CLIP = {
    "hidden_size": 48,
    "intermediate_size": 70,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "projection_dim": 24,
    "vocab_size": 99,
    "max_position_embeddings": 64,
}
T5 = {"d_model": 40, "d_kv": 8, "d_ff": 70, "num_layers": 2, "num_heads": 6, "vocab_size": 99}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 48,
    "embed_dim": 16,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
}
QWEN_ROPE = {"rope_parameters": {"type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}}
SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
GEMMA4_LAYERS = ["sliding_attention", "full_attention"]

# Class -> the arguments of its config.
CONFIGS = {
    "CLIPTextModel": CLIP,
    "CLIPTextModelWithProjection": CLIP,
    "Gemma2Model": {**DECODER, "head_dim": 12, "query_pre_attn_scalar": 12},
    "Gemma3ForConditionalGeneration": {
        "text_config": {**DECODER, "head_dim": 12, "query_pre_attn_scalar": 12},
        "vision_config": SIGLIP,
        "mm_tokens_per_image": 4,
    },
    # Its last layer, of full attention, has wider heads.
    "Gemma4UnifiedForConditionalGeneration": {
        "text_config": {**DECODER, "head_dim": 12, "global_head_dim": 16, "layer_types": GEMMA4_LAYERS},
        "vision_config": None,
    },
    "GemmaModel": {**DECODER, "head_dim": 12},
    "GlmModel": {**DECODER, "head_dim": 8, "attention_bias": True},
    "LlamaForCausalLM": DECODER,
    "LlamaModel": DECODER,
    "LlavaForConditionalGeneration": {
        "text_config": {**DECODER, "model_type": "llama"},
        "vision_config": {**SIGLIP, "model_type": "clip_vision_model", "projection_dim": 16},
        "image_token_index": 5,
    },
    **dict.fromkeys(
        ("Mistral3ForConditionalGeneration", "Mistral3Model"),
        {
            "text_config": {**DECODER, "model_type": "mistral", "head_dim": 12},
            "vision_config": {**SIGLIP, "model_type": "pixtral", "head_dim": 8},
        },
    ),
    "Qwen2VLForConditionalGeneration": {
        "text_config": {**DECODER, **QWEN_ROPE},
        "vision_config": {**QWEN_VISION, "hidden_size": 48},
    },
    "Qwen2_5_VLForConditionalGeneration": {"text_config": {**DECODER, **QWEN_ROPE}, "vision_config": QWEN_VISION},
    "Qwen2_5_VLTextModel": {**DECODER, **QWEN_ROPE},
    "Qwen3ForCausalLM": {**DECODER, "head_dim": 12, "tie_word_embeddings": True},
    "Qwen3Model": {**DECODER, "head_dim": 12},
    "Qwen3VLForConditionalGeneration": {
        "text_config": {**DECODER, **QWEN_ROPE, "head_dim": 8},
        "vision_config": QWEN_VISION,
    },
    "Qwen3VLModel": {"text_config": {**DECODER, **QWEN_ROPE, "head_dim": 8}, "vision_config": QWEN_VISION},
    "SmolLM3ForCausalLM": DECODER,
    "T5EncoderModel": {**T5, "feed_forward_proj": "gated-gelu"},
    "T5Gemma2Encoder": {
        "text_config": {**DECODER, "head_dim": 12, "query_pre_attn_scalar": 12, "dropout_rate": 0.0},
        "vision_config": SIGLIP,
        "mm_tokens_per_image": 4,
    },
    "T5GemmaEncoderModel": {
        "encoder": {**DECODER, "head_dim": 12, "query_pre_attn_scalar": 12},
        "is_encoder_decoder": False,
    },
    "UMT5EncoderModel": T5,
}

ONE_KEY_HEAD = {**DECODER, "num_key_value_heads": 1, "head_dim": 12}
# What published models of a class have besides.
VARIANTS = {
    "one key head": ("GemmaModel", ONE_KEY_HEAD),
    "one key head, biased": ("GlmModel", {**ONE_KEY_HEAD, "attention_bias": True}),
    # Keys of the full attention are its values too, and the last two layers attend to keys of the two before.
    "Gemma 4": (
        "Gemma4UnifiedForConditionalGeneration",
        {
            "text_config": {
                **DECODER,
                "head_dim": 12,
                "global_head_dim": 16,
                "num_global_key_value_heads": 1,
                "attention_k_eq_v": True,
                "num_hidden_layers": 4,
                "num_kv_shared_layers": 2,
                "layer_types": 2 * GEMMA4_LAYERS,
            },
            "vision_config": None,
        },
    ),
}


def tiny(name: str, config: dict[str, Any] | None = None) -> PreTrainedModel:
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    model = cls(cls.config_class(**(config or CONFIGS[name]))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.05))
    return model


@torch.no_grad()
def encoded(model: PreTrainedModel) -> list[torch.Tensor]:
    """What a pipeline may read of an encoder's output: two prompts of different lengths."""
    tokens = torch.randint(3, 99, (2, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[1, 7:], tokens[1, 7:] = 0, 0
    output = model(input_ids=tokens, attention_mask=mask, output_hidden_states=True)
    rows = mask.bool()
    found = [states[rows] for states in output.hidden_states]
    for name in ("last_hidden_state", "logits"):
        found += [output[name][rows]] if name in output else []
    return found + [output[name] for name in ("pooler_output", "text_embeds") if name in output]


def sharded_worker(name: str, folder: str) -> dict:
    cls, axis = getattr(transformers, name), Axis.of_all()
    wanted = encoded(load_whole(cls, Path(folder), torch.float32))
    with elements_read() as read:
        model = load_sharded_text_encoder(cls, Path(folder), axis, torch.float32)
    tensors = {x.data_ptr(): x for x in model.state_dict().values()}  # words may have two names
    sharded = {path: module for path, module in model.named_modules() if hasattr(module, "sharding")}
    return {
        "errors": [relative_l2(x, y) for x, y in zip(encoded(model), wanted, strict=True)],
        "read": sum(read),
        "held": sum(x.numel() for x in tensors.values()),
        "sharded": {path: module.weight.numel() for path, module in sharded.items() if hasattr(module, "weight")},
    }


def quantized_worker(folder: str) -> tuple[str, int]:
    with elements_read() as read:
        message = message_of(
            load_sharded_text_encoder, transformers.T5EncoderModel, Path(folder), Axis.of_all(), torch.float32
        )
    return message, sum(read)


def save_quantized(folder: str) -> None:
    """A T5 as bitsandbytes' LLM.int8 writes it: integers in the weights' place, and the largest of their rows."""
    tiny("T5EncoderModel").save_pretrained(folder)
    file, config = Path(folder, "model.safetensors"), Path(folder, "config.json")
    tensors = load_file(file)
    for name in [name for name in tensors if "SelfAttention.q" in name]:
        largest = tensors[name].abs().amax(1)
        tensors[name.replace("weight", "SCB")] = largest
        tensors[name] = (tensors[name] / largest[:, None] * 127).round().to(torch.int8)
    save_file(tensors, file, metadata={"format": "pt"})
    quantization = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": quantization}))


class TestSharded(unittest.TestCase):
    def test_quantized_weights_are_not_cut(self):
        with tempfile.TemporaryDirectory() as folder:
            save_quantized(folder)
            for message, read in run_ranks(2, quantized_worker, folder):
                assert "the checkpoint of this T5EncoderModel is quantised (bitsandbytes)" in message, message
                assert "use text_encoders='first-rank' or 'replicate'" in message and read == 0, message

    def test_every_plan_has_a_tiny_model(self):
        assert CONFIGS.keys() == TEXT_ENCODER_PLANS.keys()

    @parameterized.expand([(name, world) for name in (*CONFIGS, *VARIANTS) for world in (2, 3)])
    def test_embeddings_are_those_of_one_process(self, name, world):
        name, config = VARIANTS.get(name) or (name, CONFIGS[name])
        whole = tiny(name, config)
        layers = {
            path: module.weight.numel()
            for path, module in whole.named_modules()
            if isinstance(module, torch.nn.Linear)
            and re.search(r"(?<!blocks)\.\d+\.", path)
            and "vis" not in path
            # One key head is shared by all ranks.
            and not (re.search("[kv]_proj", path) and module.out_features in (12, 16))
        }
        with tempfile.TemporaryDirectory() as folder:
            whole.save_pretrained(folder)
            results = run_ranks(world, sharded_worker, name, folder)
        for result in results:
            assert max(result["errors"]) <= FLOAT32_BAR, result["errors"]
            # Every Linear of every layer is cut, and a rank reads what it keeps and no more.
            assert layers.keys() <= result["sharded"].keys()
            assert result["read"] == result["held"]
        for path, size in layers.items():
            assert sum(result["sharded"][path] for result in results) == size


if __name__ == "__main__":
    unittest.main()
