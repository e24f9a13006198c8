"""Those of videos that take more than latents and text: other videos, pictures, what came before."""

from collections.abc import Mapping
from typing import Any

import torch

from .known_model import KnownModel, Randn, Size, mask_of
from .videos import cogvideox, hunyuan_video, wan


def _wan_vace(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    given = wan(randn, size, config)
    control = randn(1, config["vace_in_channels"], *given["hidden_states"].shape[2:])
    return given | {"control_hidden_states": control}


def _wan_with_image(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """A picture's 257 tokens beside the text; its latents are among the channels."""
    return wan(randn, size, config) | {"encoder_hidden_states_image": randn(1, 257, config["image_dim"])}


def _framepack(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """A section of a video, after its first frame; before the sections that were made already, in reversed order."""
    given = hunyuan_video(randn, size, config)
    channels, frames, height, width = given["hidden_states"].shape[1:]
    device = given["timestep"].device
    first, now, last, next_two, others = torch.arange(1 + frames + 1 + 2 + 16, device=device).split(
        [1, frames, 1, 2, 16]
    )
    return given | {
        "image_embeds": randn(1, 729, config["image_proj_dim"]),
        "indices_latents": now,
        "latents_clean": randn(1, channels, 2, height, width),
        "indices_latents_clean": torch.cat([first, last]),
        "latents_history_2x": randn(1, channels, 2, height, width),
        "indices_latents_history_2x": next_two,
        "latents_history_4x": randn(1, channels, 16, height, width),
        "indices_latents_history_4x": others,
    }


def _consisid(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """A face, as a vector and as the tokens of some layers of its encoder; its latents are among the channels."""
    return cogvideox(randn, size, config) | {
        "id_cond": randn(1, config["LFE_id_dim"]),
        "id_vit_hidden": [randn(1, 577, config["LFE_vit_dim"]) for _ in range(config["LFE_num_scale"])],
    }


def _helios(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """A section of a video, after what was made already: its first frame, and the last 16, 2 and 1."""
    given = wan(randn, size, config)
    channels, frames, height, width = given["hidden_states"].shape[1:]
    places = torch.arange(1 + 16 + 2 + 1 + frames, device=given["timestep"].device)[None]
    first, long, middle, last, now = places.split([1, 16, 2, 1, frames], 1)
    return given | {
        "indices_hidden_states": now,
        "latents_history_short": randn(1, channels, 2, height, width),
        "indices_latents_history_short": torch.cat([first, last], 1),
        "latents_history_mid": randn(1, channels, 2, height, width),
        "indices_latents_history_mid": middle,
        "latents_history_long": randn(1, channels, 16, height, width),
        "indices_latents_history_long": long,
    }


def _wan_animate(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """A section of a video, after its reference frame, with its poses and the pixels of its face."""
    given = _wan_with_image(randn, size, config)
    frames, height, width = given["hidden_states"].shape[2:]
    face = config["motion_encoder_size"]
    return given | {
        "hidden_states": randn(1, config["in_channels"], frames + 1, height, width),
        "pose_hidden_states": randn(1, config["latent_channels"], frames, height, width),
        "face_pixel_values": randn(1, 3, size.frames, face, face),
    }


def _sana_wm(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """32 pixels and 8 frames to a latent; the first is given. A camera that goes straight on, and its rays."""
    shape = (frames, height, width) = (size.frames - 1) // 8 + 1, size.height // 32, size.width // 32
    latents = randn(1, config["in_channels"], *shape)
    timestep = torch.full((1, 1, frames), 500.0, device=latents.device)
    timestep[..., 0] = 0
    pose = torch.eye(4, device=latents.device, dtype=latents.dtype).repeat(frames, 1, 1)
    pose[:, 2, 3] = torch.arange(frames, device=latents.device) / frames
    lens = latents.new_tensor([width, width, width / 2, height / 2]).expand(frames, 4)
    return {
        "hidden_states": latents,
        "encoder_hidden_states": randn(1, 1, size.text, config["caption_channels"]),
        "encoder_attention_mask": mask_of(size.text // 2, size.text, latents.device),
        "timestep": timestep,
        "camera_conditions": torch.cat([pose.flatten(1), lens], 1)[None],
        "chunk_plucker": randn(1, config["chunk_plucker_channels"], *shape),
    }


VIDEOS_WITH_MORE = {
    "wan-vace": KnownModel("WanVACETransformer3DModel", Size(480, 832, 81), _wan_vace),
    "framepack": KnownModel(
        "HunyuanVideoFramepackTransformer3DModel",
        Size(720, 1280, 33, 256),
        _framepack,
        {"has_image_proj": True, "has_clean_x_embedder": True},
    ),
    "consisid": KnownModel(
        "ConsisIDTransformer3DModel",
        Size(480, 720, 49, 226),
        _consisid,
        {
            "in_channels": 32,
            "num_attention_heads": 48,
            "num_layers": 42,
            "use_rotary_positional_embeddings": True,
            "is_train_face": True,
        },
    ),
    "chronoedit": KnownModel(
        "ChronoEditTransformer3DModel",
        Size(480, 832, 5),
        _wan_with_image,
        {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120},
    ),
    "helios": KnownModel("HeliosTransformer3DModel", Size(384, 640, 33), _helios),
    "wan-animate": KnownModel(
        "WanAnimateTransformer3DModel",
        Size(720, 1280, 77),
        _wan_animate,
        {"added_kv_proj_dim": 5120},
    ),
    "sana-wm": KnownModel(
        "SanaWMTransformer3DModel",
        Size(704, 1280, 161, 300),
        _sana_wm,
        multiple=32,
        frames_apart=8,
    ),
}
