"""Those of videos that take all that there is as one row of tokens, and where each of them is."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from .known_model import KnownModel, Randn, Size


def _minimax_h3(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """Text, two channels of sound, 40 latents a second, and video, of whose 17 frames in a row the first is a latent.

    Its 24 frames a second are 40 steps of its clock, which starts where the text ends.
    """
    height, width = size.height // 32, size.width // 32
    frames, heard = size.frames // 17 * 5 + size.frames % 17 // 4 + 1, round(size.frames / 24 * 40)
    rows = (size.text, 2 * heard, frames * height * width)
    text, sound, video = torch.arange(sum(rows), device=randn(1).device).split(rows)

    def count(tokens: int) -> torch.Tensor:
        return torch.arange(tokens, device=text.device, dtype=torch.float32)

    def across(tokens: int) -> torch.Tensor:
        return 16 + 32 * (count(tokens) - tokens / 2) / math.sqrt(height * width)

    taken = torch.tensor([1, 4, 4, 4, 4], device=text.device).repeat(frames // 5 + 1)[:frames]
    seen = size.text + (taken.cumsum(0) - taken) * (40 / 24)
    zero, columns = count(1), across(width)
    places = [
        torch.cartesian_prod(count(size.text), zero, zero),
        torch.cartesian_prod(size.text + count(heard), zero, columns[:1]),
        torch.cartesian_prod(size.text + count(heard), zero, columns[-1:]),
        torch.cartesian_prod(seen, across(height), columns),
    ]
    tags = [torch.full_like(row, tag) for row, tag in ((text, 1), (sound, 2), (video, 0))]
    return {
        "hidden_states": randn(1, len(video), config["in_channels"] * math.prod(config["patch_size"])),
        "audio_hidden_states": randn(1, len(sound), config["audio_in_channels"]),
        "encoder_hidden_states": randn(1, size.text, config["text_dim"]),
        "timestep": torch.tensor([0.25, 0.5], device=text.device),
        "timestep_indices": (torch.cat(tags) == 2).long(),
        "token_tags": torch.cat(tags),
        "position_ids": torch.cat(places),
        "video_indices": video,
        "audio_indices": sound,
        "text_indices": text,
    }


def _cosmos3(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """Text by its words, and video long after it by the clock of its positions."""
    frames, height, width = (size.frames - 1) // 4 + 1, size.height // 16, size.width // 16
    shape = (frames, *(math.ceil(n / config["latent_patch_size"]) for n in (height, width)))
    latents = randn(1, config["latent_channel"], frames, height, width)
    text, video = torch.arange(size.text + math.prod(shape), device=latents.device).split(
        [size.text, math.prod(shape)]
    )
    moments, rows, columns = (torch.arange(n, device=latents.device) for n in shape)
    start = size.text + config["unified_3d_mrope_temporal_modality_margin"]
    places = torch.cat([text.expand(3, -1), torch.cartesian_prod(start + moments, rows, columns).T], 1)
    return {
        "input_ids": text % config["vocab_size"],
        "text_indexes": text,
        "position_ids": places.float(),
        "und_len": len(text),
        "sequence_length": len(text) + len(video),
        "vision_tokens": [latents],
        "vision_token_shapes": [shape],
        "vision_sequence_indexes": video,
        "vision_mse_loss_indexes": video,
        "vision_timesteps": torch.full(video.shape, 500.0, device=latents.device),
        "vision_noisy_frame_indexes": [moments],
    }


VIDEOS_IN_ONE_ROW = {
    "minimax-h3": KnownModel(
        "MiniMaxH3Transformer3DModel",
        Size(768, 1344, 124),
        _minimax_h3,
        multiple=32,
        frames_apart=17,
    ),
    "cosmos3": KnownModel("Cosmos3OmniTransformer", Size(720, 1280, 189), _cosmos3, text="input_ids"),
}
