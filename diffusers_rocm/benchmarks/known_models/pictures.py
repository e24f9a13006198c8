"""Of pictures, those that take latents as their VAE has them."""

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed, get_2d_rotary_pos_embed_lumina
from torch import Tensor

from .known_model import KnownModel, Randn, Size, mask_of


def _latents(randn: Randn, size: Size, channels: int, pixels: int = 8) -> Tensor:
    """Of a VAE that takes so many pixels along each side for one."""
    return randn(1, channels, size.height // pixels, size.width // pixels)


def _picture(
    randn: Randn, size: Size, config: Mapping[str, Any], text: int, timestep: float, pixels: int = 8
) -> dict[str, Any]:
    """Latents, text of so many channels, and the timestep."""
    latents = _latents(randn, size, config["in_channels"], pixels)
    return {
        "hidden_states": latents,
        "encoder_hidden_states": randn(1, size.text, text),
        "timestep": latents.new_tensor([timestep]),
    }


def _z_image(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """Lists, of one picture and its text."""
    latents = randn(config["in_channels"], 1, size.height // 8, size.width // 8)
    return {
        "x": [latents],
        "t": torch.tensor([0.5], device=latents.device, dtype=latents.dtype),
        "cap_feats": [randn(size.text, config["cap_feat_dim"])],
    }


def _lumina2(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    given = _picture(randn, size, config, config["cap_feat_dim"], 0.5)
    return given | {"encoder_attention_mask": mask_of(size.text, size.text, given["hidden_states"].device)}


def _lumina_next(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """Attention in proportion to the number of tokens."""
    given = _picture(randn, size, config, config["cross_attention_dim"], 0.5)
    like, head = given["hidden_states"], config["hidden_size"] // config["num_attention_heads"]
    return given | {
        "encoder_mask": mask_of(size.text, size.text, like.device),
        "image_rotary_emb": get_2d_rotary_pos_embed_lumina(head, size.height // 16, size.width // 16).to(like.device),
        "cross_attention_kwargs": {"base_sequence_length": (config["sample_size"] // config["patch_size"]) ** 2},
    }


def _sd3(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    given = _picture(randn, size, config, config["joint_attention_dim"], 500)
    return given | {"pooled_projections": randn(1, config["pooled_projection_dim"])}


def _aura_flow(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    return _picture(randn, size, config, config["joint_attention_dim"], 0.5)


def _fibo2(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """Text as several layers of its encoder tell it."""
    latents = _latents(randn, size, config["in_channels"])
    return {
        "hidden_states": latents,
        "encoder_hidden_states": randn(1, 1 + len(config["injection_layer_ids"]), size.text, config["cap_feat_dim"]),
        "timestep": latents.new_tensor([0.5]),
    }


def _glm_image(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens that a language model has drawn, one for each of the picture's."""
    given = _picture(randn, size, config, config["text_embed_dim"], 500)
    like, tokens = given["hidden_states"], size.height // 16 * (size.width // 16)
    drawn = torch.arange(tokens, device=like.device)[None] * 97 % config["prior_vq_quantizer_codebook_size"]
    return given | {
        "prior_token_id": drawn,
        "prior_token_drop": torch.zeros_like(drawn, dtype=torch.bool),
        "target_size": like.new_tensor([[size.height, size.width]]),
        "crop_coords": like.new_zeros(1, 2),
    }


def _cogview(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    given = _picture(randn, size, config, config["text_embed_dim"], 500)
    pixels = given["hidden_states"].new_tensor([[size.height, size.width]])
    return given | {"original_size": pixels, "target_size": pixels, "crop_coords": torch.zeros_like(pixels)}


def _dit(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """Of a class, not of a text."""
    latents = _latents(randn, size, config["in_channels"])
    return {
        "hidden_states": latents,
        "timestep": torch.tensor([500], device=latents.device),
        "class_labels": torch.tensor([config["num_embeds_ada_norm"] // 2], device=latents.device),
    }


def _ernie_image(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """Latents that the pipeline has packed, 16 pixels to a token."""
    latents = _latents(randn, size, config["in_channels"], 16 // config["patch_size"])
    return {
        "hidden_states": latents,
        "text_bth": randn(1, size.text, config["text_in_dim"]),
        "text_lens": torch.tensor([size.text], device=latents.device),
        "timestep": latents.new_tensor([500]),
    }


def _hidream(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """Text of T5, and of all layers of Llama."""
    latents = _latents(randn, size, config["in_channels"])
    t5, llama = config["caption_channels"]
    return {
        "hidden_states": latents,
        "encoder_hidden_states_t5": randn(1, size.text, t5),
        "encoder_hidden_states_llama3": randn(max(config["llama_layers"]) + 1, 1, size.text, llama),
        "pooled_embeds": randn(1, config["text_emb_dim"]),
        "timesteps": latents.new_tensor([500]),
    }


def _hunyuan_dit(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """Text of CLIP, as long as the config says, and of T5, where it is to be as long as the config says too."""
    given = _picture(randn, size, config, config["cross_attention_dim_t5"], 500)
    like, text = given["hidden_states"], config["text_len"]
    grid = size.height // 16, size.width // 16
    if config["use_style_cond_and_image_meta_size"]:
        given["style"] = torch.zeros(1, device=like.device, dtype=torch.long)
        given["image_meta_size"] = like.new_tensor([[1024, 1024, size.height, size.width, 0, 0]])
    return given | {
        "encoder_hidden_states": randn(1, text, config["cross_attention_dim"]),
        "text_embedding_mask": mask_of(text, text, like.device),
        "encoder_hidden_states_t5": given["encoder_hidden_states"],
        "text_embedding_mask_t5": mask_of(size.text, size.text, like.device),
        "image_rotary_emb": get_2d_rotary_pos_embed(
            config["attention_head_dim"], ((0, 0), (32, 32)), grid, device=like.device
        ),
    }


def _hunyuan_image(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """Half of the text is padding, and none of it is to be drawn: all of that for the second encoder is."""
    given = _picture(randn, size, config, config["text_embed_dim"], 500, 32)
    like = given["hidden_states"]
    if config["text_embed_2_dim"] is not None:
        given["encoder_hidden_states_2"] = like.new_zeros(1, 128, config["text_embed_2_dim"])
        given["encoder_attention_mask_2"] = mask_of(0, 128, like.device)
    if config["guidance_embeds"]:
        given["guidance"] = like.new_tensor([4000])
    if config["use_meanflow"]:
        given["timestep_r"] = like.new_tensor([480])
    return given | {"encoder_attention_mask": mask_of(size.text // 2, size.text, like.device)}


def _omnigen(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """Words and the timestep see what is before them; the picture sees all."""
    latents = _latents(randn, size, config["in_channels"])
    seen = size.text + 1
    tokens = seen + size.height // 16 * (size.width // 16)
    mask = torch.ones(1, tokens, tokens, device=latents.device, dtype=torch.long)
    mask[:, :seen] = mask[:, :seen].tril()
    return {
        "hidden_states": latents,
        "timestep": latents.new_tensor([0.5]),
        "input_ids": torch.arange(size.text, device=latents.device)[None] * 7 % config["vocab_size"],
        "input_img_latents": [],
        "input_image_sizes": {},
        "attention_mask": mask,
        "position_ids": torch.arange(tokens, device=latents.device)[None],
    }


def _pixart(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    given = _picture(randn, size, config, config["caption_channels"], 500)
    like, told = given["hidden_states"], config["use_additional_conditions"]
    conditions: dict[str, Tensor | None] = {"resolution": None, "aspect_ratio": None}
    if config["sample_size"] == 128 if told is None else told:
        conditions["resolution"] = like.new_tensor([[size.height, size.width]])
        conditions["aspect_ratio"] = like.new_tensor([[size.height / size.width]])
    return given | {
        "encoder_attention_mask": mask_of(size.text, size.text, like.device),
        "added_cond_kwargs": conditions,
    }


def _prx(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    given = _picture(randn, size, config, config["context_in_dim"], 0.5)
    return given | {"attention_mask": mask_of(size.text, size.text, given["hidden_states"].device)}


def _sana(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    given = _picture(randn, size, config, config["caption_channels"], 500 * config["timestep_scale"], 32)
    if config["guidance_embeds"]:
        given["guidance"] = given["hidden_states"].new_tensor([4.5 * config["guidance_embeds_scale"]])
    return given | {"encoder_attention_mask": mask_of(size.text, size.text, given["hidden_states"].device)}


PICTURES = {
    "sd3.5-large": KnownModel(
        "SD3Transformer2DModel",
        Size(1024, 1024, text=333),
        _sd3,
        {
            "num_layers": 38,
            "num_attention_heads": 38,
            "caption_projection_dim": 2432,
            "pos_embed_max_size": 192,
            "qk_norm": "rms_norm",
        },
    ),
    "z-image": KnownModel("ZImageTransformer2DModel", Size(1024, 1024, text=256), _z_image, text="cap_feats"),
    "lumina2": KnownModel("Lumina2Transformer2DModel", Size(1024, 1024, text=256), _lumina2, {"cap_feat_dim": 2304}),
    "lumina-next": KnownModel(
        "LuminaNextDiT2DModel", Size(1024, 1024, text=256), _lumina_next, {"num_layers": 24, "num_kv_heads": 8}
    ),
    "auraflow": KnownModel(
        "AuraFlowTransformer2DModel", Size(1024, 1024, text=256), _aura_flow, {"pos_embed_max_size": 9216}
    ),
    "fibo2": KnownModel("BriaFibo2Transformer2DModel", Size(1024, 1024, text=2048), _fibo2),
    "cogview3-plus": KnownModel("CogView3PlusTransformer2DModel", Size(1024, 1024, text=224), _cogview),
    "cogview4": KnownModel(
        "CogView4Transformer2DModel",
        Size(1024, 1024, text=1024),
        _cogview,
        {"num_layers": 28, "num_attention_heads": 32, "attention_head_dim": 128},
    ),
    "glm-image": KnownModel(
        "GlmImageTransformer2DModel",
        Size(1024, 1024),
        _glm_image,
        {"num_attention_heads": 32, "attention_head_dim": 128},
    ),
    "dit": KnownModel(
        "DiTTransformer2DModel", Size(512, 512), _dit, {"out_channels": 8, "sample_size": 64}, text=None
    ),
    "ernie-image": KnownModel(
        "ErnieImageTransformer2DModel",
        Size(1024, 1024),
        _ernie_image,
        {
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_layers": 36,
            "ffn_hidden_size": 12288,
            "text_in_dim": 3072,
        },
        text="text_bth",
    ),
    "hidream-i1": KnownModel(
        "HiDreamImageTransformer2DModel",
        Size(1024, 1024, text=128),
        _hidream,
        {
            "patch_size": 2,
            "in_channels": 16,
            "caption_channels": [4096, 4096],
            "axes_dims_rope": (64, 32, 32),
            "llama_layers": [*range(32), *[31] * 16],
        },
        text="encoder_hidden_states_llama3",
    ),
    "hunyuan-dit": KnownModel(
        "HunyuanDiT2DModel",
        Size(1024, 1024, text=256),
        _hunyuan_dit,
        {
            "in_channels": 4,
            "patch_size": 2,
            "sample_size": 128,
            "hidden_size": 1408,
            "num_layers": 40,
            "mlp_ratio": 4.3637,
            "use_style_cond_and_image_meta_size": False,
        },
        text="encoder_hidden_states_t5",
    ),
    "hunyuan-image": KnownModel(
        "HunyuanImageTransformer2DModel",
        Size(2048, 2048, text=1000),
        _hunyuan_image,
        {"text_embed_2_dim": 1472},
        multiple=32,
    ),
    "omnigen": KnownModel(
        "OmniGenTransformer2DModel",
        Size(1024, 1024),
        _omnigen,
        {"rope_scaling": {"short_factor": [1.0] * 48, "long_factor": [1.0] * 48}},
        text="input_ids",
    ),
    "pixart-sigma": KnownModel(
        "PixArtTransformer2DModel",
        Size(1024, 1024, text=300),
        _pixart,
        {"caption_channels": 4096, "interpolation_scale": 2, "use_additional_conditions": False},
    ),
    "prx": KnownModel("PRXTransformer2DModel", Size(512, 512, text=256), _prx),
    "sana": KnownModel("SanaTransformer2DModel", Size(1024, 1024, text=300), _sana, multiple=32),
}
