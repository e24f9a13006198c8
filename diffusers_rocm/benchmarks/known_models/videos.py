"""Those of videos."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from .known_model import KnownModel, Randn, Size, mask_of


def video(randn: Randn, size: Size, channels: int, text: int, frames: int = 4) -> dict[str, Any]:
    """Latents of a VAE that takes 8 pixels and so many frames for one, and text."""
    latents = randn(1, channels, (size.frames - 1) // frames + 1, size.height // 8, size.width // 8)
    return {
        "hidden_states": latents,
        "encoder_hidden_states": randn(1, size.text, text),
        "timestep": torch.tensor([500], device=latents.device),
    }


def hunyuan_video(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """Half of the text is padding."""
    given = video(randn, size, config["in_channels"], config["text_embed_dim"])
    like = given["hidden_states"]
    return given | {
        "encoder_attention_mask": mask_of(size.text // 2, size.text, like.device),
        "pooled_projections": randn(1, config["pooled_projection_dim"]),
        "guidance": torch.tensor([6000.0], device=like.device, dtype=like.dtype),
    }


def wan(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    return video(randn, size, config["in_channels"], config["text_dim"])


def _mochi(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    given = video(randn, size, config["in_channels"], config["text_embed_dim"], 6)
    mask = mask_of(size.text, size.text, given["timestep"].device)
    return given | {"encoder_attention_mask": mask}


def cogvideox(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """Frames before channels; positions by random angles."""
    given = video(randn, size, config["in_channels"], config["text_embed_dim"])
    latents = given["hidden_states"].transpose(1, 2).contiguous()
    tokens = latents.shape[1] * (size.height // 16) * (size.width // 16)
    angles = randn(tokens, config["attention_head_dim"] // 2).float().repeat_interleave(2, 1)
    return given | {"hidden_states": latents, "image_rotary_emb": (angles.cos(), angles.sin())}


def _ltx(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """32 pixels and 8 frames to a token."""
    frames, height, width = (size.frames - 1) // 8 + 1, size.height // 32, size.width // 32
    latents = randn(1, frames * height * width, config["in_channels"])
    return {
        "hidden_states": latents,
        "encoder_hidden_states": randn(1, size.text, config["caption_channels"]),
        "encoder_attention_mask": mask_of(size.text, size.text, latents.device),
        "timestep": torch.tensor([500], device=latents.device),
        "num_frames": frames,
        "height": height,
        "width": width,
        "rope_interpolation_scale": (8 / 25, 32, 32),
    }


def _hunyuan_video_15(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """16 pixels to a latent, and after these the channels of a first frame. Of nothing: that frame, its image, glyphs.

    Half of the text is padding.
    """
    latents = randn(1, config["in_channels"], (size.frames - 1) // 4 + 1, size.height // 16, size.width // 16)
    latents[:, config["out_channels"] :] = 0
    device, image, glyphs = latents.device, 729, 256
    return {
        "hidden_states": latents,
        "encoder_hidden_states": randn(1, size.text, config["text_embed_dim"]),
        "encoder_attention_mask": mask_of(size.text // 2, size.text, device),
        "encoder_hidden_states_2": latents.new_zeros(1, glyphs, config["text_embed_2_dim"]),
        "encoder_attention_mask_2": mask_of(0, glyphs, device),
        "image_embeds": latents.new_zeros(1, image, config["image_embed_dim"]),
        "timestep": torch.tensor([500.0], device=device, dtype=latents.dtype),
    }


def _ltx2(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """With its sound; 24 frames a second. Registers stand where the text is padding."""
    frames, height, width = (size.frames - 1) // 8 + 1, size.height // 32, size.width // 32
    second = config["audio_sampling_rate"] / config["audio_hop_length"] / config["audio_scale_factor"]
    sound = round(size.frames / 24 * second)
    latents = randn(1, frames * height * width, config["in_channels"])
    if config.get("use_prompt_embeddings", True):
        text = audio_text = config["caption_channels"]
    else:
        text, audio_text = config["cross_attention_dim"], config["audio_cross_attention_dim"]
    timestep, mask = torch.tensor([500.0], device=latents.device), mask_of(size.text, size.text, latents.device)
    given = {
        "hidden_states": latents,
        "audio_hidden_states": randn(1, sound, config["audio_in_channels"]),
        "encoder_hidden_states": randn(1, size.text, text),
        "audio_encoder_hidden_states": randn(1, size.text, audio_text),
        "encoder_attention_mask": mask,
        "audio_encoder_attention_mask": mask,
        "timestep": timestep,
        "num_frames": frames,
        "height": height,
        "width": width,
        "audio_num_frames": sound,
    }
    return given | ({"sigma": timestep} if config.get("cross_attn_mod") else {})


def _kandinsky_latents(randn: Randn, size: Size, config: Mapping[str, Any]) -> torch.Tensor:
    """Channels last, and after them those of a first frame, of which there is none."""
    channels = config["in_visual_dim"]
    all_channels = 2 * channels + 1 if config["visual_cond"] else channels
    latents = randn(1, (size.frames - 1) // 4 + 1, size.height // 8, size.width // 8, all_channels)
    latents[..., channels:] = 0
    return latents


def _kandinsky5(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    latents = _kandinsky_latents(randn, size, config)
    frames, device = latents.shape[1], latents.device
    smaller = all(480 <= side <= 854 for side in (size.height, size.width))
    return {
        "hidden_states": latents,
        "encoder_hidden_states": randn(1, size.text, config["in_text_dim"]),
        "pooled_projections": randn(1, config["in_text_dim2"]),
        "timestep": torch.tensor([500.0], device=device, dtype=latents.dtype),
        "visual_rope_pos": [torch.arange(n, device=device) for n in (frames, size.height // 16, size.width // 16)],
        "text_rope_pos": torch.arange(size.text, device=device),
        "scale_factor": (1, 2, 2) if smaller else (1, 3.16, 3.16),
    }


def _cosmos(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    given = video(randn, size, config["in_channels"], config["text_embed_dim"], 8)
    like = given["hidden_states"]
    return given | {"timestep": torch.tensor([0.5], device=like.device, dtype=like.dtype), "fps": 30}


def _latte(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """Of a VAE of pictures; as many frames as the config says."""
    return video(randn, size, config["in_channels"], config["caption_channels"], 1)


def _sana_video(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    given = video(randn, size, config["in_channels"], config["caption_channels"])
    mask = mask_of(size.text, size.text, given["timestep"].device)
    return given | {"encoder_attention_mask": mask}


def _allegro(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """Positions along each axis, by random angles, and where each token is."""
    given = video(randn, size, config["in_channels"], config["caption_channels"])
    frames, height, width = given["hidden_states"].shape[2:]
    sizes, device = (frames, height // 2, width // 2), given["timestep"].device
    angles = [randn(n, config["attention_head_dim"] // 6).float().repeat(1, 2) for n in sizes]
    places = torch.cartesian_prod(*(torch.arange(n, device=device) for n in sizes)).T
    return given | {
        "encoder_attention_mask": mask_of(size.text, size.text, device),
        "image_rotary_emb": (tuple((each.cos(), each.sin()) for each in angles), tuple(places[:, None])),
    }


def _easyanimate(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    return video(randn, size, config["in_channels"], config["text_embed_dim"])


def _anyflow(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """Frames before channels, each with the timestep that it has and that it goes to."""
    given = wan(randn, size, config)
    latents = given["hidden_states"].transpose(1, 2).contiguous()
    timestep = latents.new_full(latents.shape[:2], 500, dtype=torch.float32)
    return given | {"hidden_states": latents, "timestep": timestep, "r_timestep": timestep / 2}


def _kandinsky6(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """With its sound; 24 frames a second."""
    latents = _kandinsky_latents(randn, size, config)
    return {
        "hidden_states": latents,
        "audio_hidden_states": randn(1, math.ceil(size.frames / 24 * 44100 / 1024), config["in_audio_dim"]),
        "encoder_hidden_states": randn(1, size.text, config["in_text_dim"]),
        "pooled_projections": randn(1, config["in_text_dim2"]),
        "timestep": torch.tensor([500.0], device=latents.device, dtype=latents.dtype),
    }


def _motif_video(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """After the latents the channels of a first frame, of which there is none. Half of the text is padding."""
    given = video(randn, size, config["in_channels"], config["text_embed_dim"])
    given["hidden_states"][:, config["out_channels"] :] = 0
    return given | {"encoder_attention_mask": mask_of(size.text // 2, size.text, given["timestep"].device)}


VIDEOS = {
    "hunyuan-video": KnownModel("HunyuanVideoTransformer3DModel", Size(720, 1280, 129, 256), hunyuan_video),
    "wan": KnownModel("WanTransformer3DModel", Size(480, 832, 81), wan),
    "mochi": KnownModel("MochiTransformer3DModel", Size(480, 848, 163, 256), _mochi, frames_apart=6),
    "cogvideox": KnownModel(
        "CogVideoXTransformer3DModel",
        Size(480, 720, 49, 226),
        cogvideox,
        {"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True},
    ),
    "ltx": KnownModel("LTXVideoTransformer3DModel", Size(512, 704, 161, 128), _ltx, multiple=32, frames_apart=8),
    "hunyuan-video-1.5": KnownModel("HunyuanVideo15Transformer3DModel", Size(480, 848, 121, 1000), _hunyuan_video_15),
    "ltx-2": KnownModel(
        "LTX2VideoTransformer3DModel",
        Size(512, 768, 121, 1024),
        _ltx2,
        {"rope_type": "split"},
        multiple=32,
        frames_apart=8,
    ),
    "skyreels-v2": KnownModel(
        "SkyReelsV2Transformer3DModel",
        Size(544, 960, 97),
        wan,
        {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40},
    ),
    "kandinsky5": KnownModel(
        "Kandinsky5Transformer3DModel",
        Size(512, 768, 121),
        _kandinsky5,
        {
            "in_visual_dim": 16,
            "out_visual_dim": 16,
            "model_dim": 1792,
            "ff_dim": 7168,
            "visual_cond": True,
        },
    ),
    # Without the channel of a padding mask, which is of zeros and takes torchvision.
    "cosmos": KnownModel(
        "CosmosTransformer3DModel",
        Size(704, 1280, 121),
        _cosmos,
        {"concat_padding_mask": False},
        frames_apart=8,
    ),
    "latte": KnownModel(
        "LatteTransformer3DModel",
        Size(512, 512, 16, 120),
        _latte,
        {
            "in_channels": 4,
            "out_channels": 8,
            "attention_head_dim": 72,
            "num_layers": 28,
            "cross_attention_dim": 1152,
            "attention_bias": True,
            "patch_size": 2,
            "activation_fn": "gelu-approximate",
            "num_embeds_ada_norm": 1000,
            "norm_type": "ada_norm_single",
            "norm_elementwise_affine": False,
            "caption_channels": 4096,
        },
        frames_apart=1,
    ),
    "sana-video": KnownModel("SanaVideoTransformer3DModel", Size(480, 832, 81, 300), _sana_video),
    "allegro": KnownModel("AllegroTransformer3DModel", Size(720, 1280, 88), _allegro),
    "easyanimate": KnownModel(
        "EasyAnimateTransformer3DModel",
        Size(512, 512, 49, 256),
        _easyanimate,
        {"in_channels": 16, "out_channels": 16, "patch_size": 2},
    ),
    "anyflow": KnownModel("AnyFlowTransformer3DModel", Size(480, 832, 81), _anyflow),
    "kandinsky6": KnownModel("Kandinsky6Transformer3DModel", Size(512, 768, 121, 1024), _kandinsky6),
    "motif-video": KnownModel(
        "MotifVideoTransformer3DModel",
        Size(736, 1280, 121),
        _motif_video,
        {
            "num_attention_heads": 12,
            "num_layers": 12,
            "num_single_layers": 24,
            "num_decoder_layers": 8,
            "text_embed_dim": 2560,
            "image_embed_dim": 1152,
        },
    ),
}
