"""Those of sounds: a frame is a latent, with neither height nor width."""

from collections.abc import Mapping
from typing import Any

import torch

from .known_model import KnownModel, Randn, Size, mask_of


def _ace_step(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """From noise to the same timestep; the context is a source of sound and what of it is to be made anew."""
    channels = config["audio_acoustic_hidden_dim"]
    latents = randn(1, size.frames, channels)
    return {
        "hidden_states": latents,
        "context_latents": randn(1, size.frames, config["in_channels"] - channels),
        "encoder_hidden_states": randn(1, size.text, config["encoder_hidden_size"] or config["hidden_size"]),
        "timestep": latents.new_tensor([0.5]),
        "timestep_r": latents.new_tensor([0.5]),
    }


def _longcat_audio(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """With no sound to begin from."""
    latents = randn(1, size.frames, config["latent_dim"])
    return {
        "hidden_states": latents,
        "encoder_hidden_states": randn(1, size.text, config["dit_text_dim"]),
        "encoder_attention_mask": mask_of(size.text, size.text, latents.device),
        "timestep": latents.new_tensor([0.5]),
        "attention_mask": mask_of(size.frames, size.frames, latents.device),
        "latent_cond": torch.zeros_like(latents),
    }


def _minimax_music3(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """What a language model has made of the text is there for each latent."""
    latents = randn(1, config["in_channels"], size.frames)
    return {
        "hidden_states": latents,
        "encoder_hidden_states": randn(1, size.frames, config["condition_dim"]),
        "timestep": latents.new_tensor([0.5]),
    }


def _stable_audio(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """Positions by random angles, as the first one before the latents has."""
    latents = randn(1, config["in_channels"], size.frames)
    angles = randn(1 + size.frames, config["attention_head_dim"] // 4).float().repeat(1, 2)
    return {
        "hidden_states": latents,
        "encoder_hidden_states": randn(1, size.text, config["cross_attention_input_dim"]),
        "global_hidden_states": randn(1, 1, config["global_states_input_dim"]),
        "timestep": latents.new_tensor([0.5]),
        "rotary_embedding": (angles.cos(), angles.sin()),
    }


def _stable_audio3(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """Half of the text is padding; the last token is the duration."""
    latents = randn(1, config["io_channels"], size.frames)
    mask = mask_of(size.text // 2, size.text, latents.device)
    mask[:, -1] = True
    return {
        "hidden_states": latents,
        "encoder_hidden_states": randn(1, size.text, config["cond_token_dim"]),
        "encoder_attention_mask": mask,
        "global_hidden_states": randn(1, config["global_cond_dim"]),
        "timestep": latents.new_tensor([0.5]),
    }


def _sound(latents: int, text: int = 512) -> Size:
    return Size(1, 1, latents, text)


_ONE_EACH = {"multiple": 1, "frames_apart": 1}

SOUNDS = {
    "ace-step": KnownModel("AceStepTransformer1DModel", _sound(1500), _ace_step, **_ONE_EACH),
    "longcat-audio": KnownModel("LongCatAudioDiTTransformer", _sound(351), _longcat_audio, **_ONE_EACH),
    "minimax-music3": KnownModel(
        "MiniMaxMusic3Transformer1DModel", _sound(689), _minimax_music3, text=None, **_ONE_EACH
    ),
    "stable-audio": KnownModel("StableAudioDiTModel", _sound(1024, 130), _stable_audio, **_ONE_EACH),
    "stable-audio-3": KnownModel("StableAudio3DiTModel", _sound(108, 257), _stable_audio3, **_ONE_EACH),
}
