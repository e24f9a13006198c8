"""Tiny VAEs with random weights, and latents of so odd a size that they have several tiles both ways."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch

from ..models.testing_utils.common import randn
from .testing_utils import with_random_weights


@dataclass(frozen=True)
class TinyVAE:
    """A VAE, its tiles, and latents for a batch of one.

    Attributes:
        tiling: arguments of `enable_tiling`, or attributes where it takes none.
        calls: how often one process calls the decoder for them.
        tiles: of how many tiles these calls are.
        batches: sizes of a batch, and whether it is sliced, that diffusers' own code can decode.
    """

    name: str
    config: Mapping[str, Any]
    tiling: Mapping[str, Any]
    latents: tuple[int, ...]
    calls: int
    tiles: int
    attributes: Mapping[str, Any] = field(default_factory=dict)
    inputs: Callable[[int], dict] = lambda batch: {}
    batches: tuple[tuple[int, bool], ...] = ((2, False), (2, True))

    def build(self) -> torch.nn.Module:
        vae = with_random_weights(getattr(diffusers, self.name)(**self.config))
        vae.enable_tiling(**self.tiling)
        vae.use_tiling = False
        for name, value in self.attributes.items():
            setattr(vae, name, value)
        return vae

    def call(self, batch: int = 1, seed: int = 0) -> dict[str, Any]:
        return {"z": randn(batch, *self.latents, seed=seed), **self.inputs(batch)}


_2D = {"block_out_channels": (4, 8), "latent_channels": 4, "norm_num_groups": 2, "sample_size": 16}
_2D |= {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
_2D |= {"layers_per_block": 1}
_CAUSAL = {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1, "temperal_downsample": [False, True]}
_STRIDES = {"tile_sample_min_height": 16, "tile_sample_min_width": 24, "tile_sample_stride_height": 12}
_STRIDES |= {"tile_sample_stride_width": 16}
_LTX = {
    "latent_channels": 8, "block_out_channels": (8, 8, 8), "down_block_types": ("LTXVideoDownBlock3D",) * 3,
    "decoder_block_out_channels": (8, 8, 8), "layers_per_block": (1, 1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1, 1), "spatio_temporal_scaling": (True, True, False),
    "decoder_spatio_temporal_scaling": (True, True, False), "decoder_inject_noise": (False,) * 4,
    "upsample_residual": (False,) * 3, "upsample_factor": (1, 1, 1), "patch_size": 1,
}  # fmt: skip
_HUNYUAN = {
    "latent_channels": 4, "block_out_channels": (4, 8, 8), "layers_per_block": 1, "norm_num_groups": 2,
    "down_block_types": ("HunyuanVideoDownBlock3D",) * 3, "up_block_types": ("HunyuanVideoUpBlock3D",) * 3,
    "spatial_compression_ratio": 4, "temporal_compression_ratio": 4,
}  # fmt: skip
_FRAMES = {"tile_sample_min_num_frames": 8, "tile_sample_stride_num_frames": 4}

TINY_VAES = {
    "kl": TinyVAE("AutoencoderKL", _2D, {}, (4, 19, 13), 12, 12),
    "kl_no_post_quant": TinyVAE("AutoencoderKL", _2D | {"use_post_quant_conv": False}, {}, (4, 11, 17), 6, 6),
    "flux2": TinyVAE("AutoencoderKLFlux2", _2D, {}, (4, 13, 19), 12, 12),
    "dc": TinyVAE(
        "AutoencoderDC",
        {
            "latent_channels": 4, "attention_head_dim": 4, "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "decoder_block_types": ("ResBlock", "EfficientViTBlock"), "encoder_block_out_channels": (8, 8),
            "decoder_block_out_channels": (8, 8), "encoder_layers_per_block": (1, 1),
            "decoder_layers_per_block": (1, 1), "encoder_qkv_multiscales": ((), (5,)),
            "decoder_qkv_multiscales": ((), (5,)),
        },
        _STRIDES,
        (4, 19, 21),
        12,
        12,
    ),
    "wan": TinyVAE("AutoencoderKLWan", _CAUSAL | {"scale_factor_spatial": 4}, _STRIDES, (4, 3, 8, 11), 27, 9),
    "wan22": TinyVAE(
        "AutoencoderKLWan",
        _CAUSAL | {
            "decoder_base_dim": 8, "is_residual": True, "in_channels": 12, "out_channels": 12, "patch_size": 2,
            "scale_factor_spatial": 8,
        },
        {name: 2 * size for name, size in _STRIDES.items()},
        (4, 3, 8, 11),
        27,
        9,
    ),
    "qwenimage": TinyVAE("AutoencoderKLQwenImage", _CAUSAL, _STRIDES, (4, 2, 8, 11), 18, 9),
    "hunyuan_video": TinyVAE("AutoencoderKLHunyuanVideo", _HUNYUAN, _STRIDES | _FRAMES, (4, 4, 8, 11), 36, 36),
    "hunyuan_video_whole_time": TinyVAE(
        "AutoencoderKLHunyuanVideo", _HUNYUAN, _STRIDES, (4, 3, 8, 11), 9, 9, {"use_framewise_decoding": False}
    ),
    "hunyuan_video15": TinyVAE(
        "AutoencoderKLHunyuanVideo15",
        {
            "latent_channels": 8, "block_out_channels": (16, 16, 16), "layers_per_block": 1,
            "spatial_compression_ratio": 4, "temporal_compression_ratio": 4,
        },
        {
            "tile_sample_min_height": 16, "tile_sample_min_width": 16, "tile_latent_min_height": 4,
            "tile_latent_min_width": 4,
        },
        (8, 3, 8, 5),
        6,
        6,
        batches=((2, True),),  # the mask of its attention is for one
    ),
    "ltx": TinyVAE("AutoencoderKLLTXVideo", _LTX, _STRIDES, (8, 3, 8, 11), 9, 9),
    "ltx_timestep": TinyVAE(
        "AutoencoderKLLTXVideo",
        _LTX | {"timestep_conditioning": True},
        _STRIDES | _FRAMES,
        (8, 4, 8, 11),
        36,
        36,
        {"use_framewise_decoding": True},
        lambda batch: {"temb": torch.full((batch,), 0.05)},
        batches=((2, False),),  # the slices of a batch are not those of its timesteps
    ),
    "ltx2": TinyVAE(
        "AutoencoderKLLTX2Video",
        {
            "latent_channels": 8, "block_out_channels": (8, 8, 8), "down_block_types": ("LTX2VideoDownBlock3D",) * 3,
            "decoder_block_out_channels": (8, 8), "layers_per_block": (1, 1, 1, 1),
            "decoder_layers_per_block": (1, 1, 1), "spatio_temporal_scaling": (True, True, False),
            "decoder_spatio_temporal_scaling": (True, True), "decoder_inject_noise": (False,) * 3,
            "downsample_type": ("spatial", "temporal", "spatiotemporal"), "upsample_residual": (False,) * 2,
            "upsample_factor": (1, 1), "patch_size": 1,
        },
        _STRIDES | _FRAMES,
        (8, 4, 8, 11),
        36,
        36,
        {"use_framewise_decoding": True},
    ),
    "cogvideox": TinyVAE(
        "AutoencoderKLCogVideoX",
        {
            "latent_channels": 4, "block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 2,
            "down_block_types": ("CogVideoXDownBlock3D",) * 4, "up_block_types": ("CogVideoXUpBlock3D",) * 4,
            "temporal_compression_ratio": 4, "sample_height": 64, "sample_width": 80,
        },
        {"tile_sample_min_height": 32, "tile_sample_min_width": 40},
        (4, 5, 7, 9),
        18,
        9,
    ),
}  # fmt: skip
