"""What a rank holds before and after it denoises: its part of the text encoders, and the VAE with what it computes."""

import diffusers
import torch
import transformers
from accelerate import init_empty_weights
from diffusers import ModelMixin

from ..benchmarks.known_models import Size, cannot_be_had
from ..loaders.text_encoder import placements_of
from .rehearsal import rehearsed
from .subject import VAE, Part


def encoder_bytes(part: Part, ranks: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of a text encoder: whole, and the first rank's part of one that is sharded, or of a whole one again.

    Raises:
        ValueError: transformers has no such class, or it fails with this config.
    """
    name, config = part
    cls = getattr(transformers, name, None)
    if cls is None:
        raise ValueError(f"transformers {transformers.__version__} has no {name}")
    try:
        with init_empty_weights():
            model = cls(cls.config_class(**config))
        model.tie_weights()
    except Exception as error:
        raise cannot_be_had(name, config, error) from error
    whole = sum(x.numel() for x in model.parameters()) * dtype.itemsize
    try:
        placements = placements_of(model, ranks)
    except ValueError:
        return whole, whole
    spared = 0
    for placement in placements:
        for key, shard in placement.shards.items():
            full = getattr(placement.module, key)
            if shard.dim is not None:
                local = shard.local_shape(full.shape, 0, ranks)
                spared += full.numel() - torch.Size(local).numel()
    return whole, whole - spared * dtype.itemsize


def decode_bytes(vae: VAE, size: Size, dtype: torch.dtype, tiled: bool) -> int:
    """Bytes of the VAE, and of what it holds at most while it decodes a picture or a video, or one tile of it.

    Raises:
        ValueError: diffusers has no such class, or it fails with this config.
    """
    cls = getattr(diffusers, vae.cls, None)
    if cls is None:
        raise ValueError(f"diffusers {diffusers.__version__} has no {vae.cls}")

    def decode(model: ModelMixin) -> None:
        height, width, frames = size.height, size.width, size.frames
        if tiled:
            side = getattr(model, "tile_sample_min_height", None) or model.tile_sample_min_size
            height, width = min(height, side), min(width, side)
            frames = min(frames, getattr(model, "tile_sample_min_num_frames", frames))
        shape = [1, vae.channels, height // vae.space, width // vae.space]
        if vae.time is not None:
            shape.insert(2, (frames - 1) // vae.time + 1)
        model.decode(torch.empty(shape, dtype=dtype), return_dict=False)

    try:
        return sum(rehearsed(lambda: cls.from_config(dict(vae.config)), decode, dtype))
    except Exception as error:
        raise cannot_be_had(vae.cls, vae.config, error) from error
