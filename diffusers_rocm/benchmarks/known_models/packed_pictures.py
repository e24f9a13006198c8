"""Of pictures, those that take latents as one row of tokens."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .known_model import KnownModel, Randn, Size, mask_of


def _ids(height: int, width: int, like: Tensor, dims: int = 3) -> Tensor:
    """Positions of packed latents: [height * width, dims], the last but one dim that of the row for dims = 3."""
    ids = torch.zeros(height, width, dims, device=like.device)
    ids[..., 1] += torch.arange(height, device=like.device)[:, None]
    ids[..., 2] += torch.arange(width, device=like.device)[None]
    return ids.reshape(-1, dims)


def _text_ids(tokens: int, like: Tensor, dims: int, axes: list[int]) -> Tensor:
    """Positions of text, [tokens, dims], that go on along some of the axes."""
    ids = torch.zeros(tokens, dims, device=like.device)
    ids[:, axes] += torch.arange(tokens, device=like.device)[:, None]
    return ids


def _packed(randn: Randn, size: Size, channels: int, text: int) -> dict[str, Any]:
    """Latents in one row, 16 pixels to a token, and text."""
    return {
        "hidden_states": randn(1, size.height // 16 * (size.width // 16), channels),
        "encoder_hidden_states": randn(1, size.text, text),
    }


def _chroma(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    given = _packed(randn, size, config["in_channels"], config["joint_attention_dim"])
    like = given["hidden_states"]
    return given | {
        "timestep": torch.tensor([0.5], device=like.device, dtype=like.dtype),
        "img_ids": _ids(size.height // 16, size.width // 16, like),
        "txt_ids": like.new_zeros(size.text, 3),
    }


def _flux(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    given = _chroma(randn, size, config)
    if config["guidance_embeds"]:
        # Exact in bf16 after the model's factor of 1000.
        given["guidance"] = torch.tensor([4.0], device=given["hidden_states"].device)
    return given | {"pooled_projections": randn(1, config["pooled_projection_dim"])}


def _flux2(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    given = _packed(randn, size, config["in_channels"], config["joint_attention_dim"])
    like = given["hidden_states"]
    return given | {
        "timestep": torch.tensor([0.5], device=like.device, dtype=like.dtype),
        "guidance": torch.tensor([4.0], device=like.device, dtype=like.dtype),
        "img_ids": _ids(size.height // 16, size.width // 16, like, 4)[None],
        "txt_ids": _text_ids(size.text, like, 4, [3])[None],
    }


def _qwen_image(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """With no mask: the pipeline gives none for a single prompt."""
    given = _packed(randn, size, config["in_channels"], config["joint_attention_dim"])
    like = given["hidden_states"]
    return given | {
        "timestep": torch.tensor([0.5], device=like.device, dtype=like.dtype),
        "img_shapes": [[(1, size.height // 16, size.width // 16)]],
    }


def _bria(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    given = _chroma(randn, size, config)
    return given | {"timestep": torch.tensor([500.0], device=given["hidden_states"].device)}


def _fibo(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """Each block has a layer of the text encoder."""
    blocks = config["num_layers"] + config["num_single_layers"]
    layers = [randn(1, size.text, config["text_encoder_dim"]) for _ in range(blocks)]
    return _bria(randn, size, config) | {"text_encoder_layers": layers}


def _flux3(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """Half a step of position from one token to the next."""
    given = _packed(randn, size, config["in_channels"], config["joint_attention_dim"])
    like = given["hidden_states"]
    if config["flow_map"]:
        given["target_timestep"] = like.new_tensor([0.25])
    return given | {
        "timestep": like.new_tensor([0.5]),
        "img_ids": _ids(size.height // 16, size.width // 16, like, 4) / 2,
        "txt_ids": _text_ids(size.text, like, 4, [3]),
    }


def _ideogram4(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """Text and picture in one row, each with zeros where the other is. Half of the text is padding, on its left."""
    height, width, padding = size.height // 16, size.width // 16, size.text // 2
    latents = randn(1, height * width, config["in_channels"])
    features = randn(1, size.text - padding, config["llm_features_dim"])
    words = _text_ids(size.text - padding, latents, 3, [0, 1, 2])
    places = torch.cat([words, _ids(height, width, latents) + 65536]).long()
    of_text = torch.full(words.shape[:1], 3, device=latents.device)
    of_picture = torch.full(latents.shape[1:2], 2, device=latents.device)
    kinds = torch.cat([of_text, of_picture])
    return {
        "hidden_states": F.pad(latents, (0, 0, size.text, 0)),
        "encoder_hidden_states": F.pad(features, (0, 0, padding, height * width)),
        "timestep": latents.new_tensor([0.5]),
        "position_ids": F.pad(places, (0, 0, padding, 0))[None],
        "segment_ids": F.pad(torch.ones_like(kinds), (padding, 0), value=-1)[None],
        "indicator": F.pad(kinds, (padding, 0))[None],
    }


def _joyimage_edit(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """A picture to edit, before what it is edited to; the text encoder has seen it too."""
    latents = randn(1, 2, config["in_channels"], 1, size.height // 8, size.width // 8)
    return {
        "hidden_states": latents,
        "encoder_hidden_states": randn(1, size.text, config["text_dim"]),
        "timestep": torch.tensor([500.0], device=latents.device),
    }


def _joyimage_edit_plus(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """Patches of the picture, then of one to edit; the text encoder has seen that too."""
    frames, down, across = config["patch_size"]
    height, width = size.height // 8 // down, size.width // 8 // across
    patches = randn(1, 2 * height * width, config["in_channels"], frames, down, across)
    return {
        "hidden_states": patches,
        "encoder_hidden_states": randn(1, size.text, config["text_dim"]),
        "encoder_hidden_states_mask": mask_of(size.text, size.text, patches.device),
        "timestep": torch.tensor([500.0], device=patches.device),
        "shape_list": [[(1, height, width)] * 2],
    }


def _krea2(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """Several layers of the text encoder. Half of the text is padding."""
    height, width = size.height // 16, size.width // 16
    latents = randn(1, height * width, config["in_channels"])
    return {
        "hidden_states": latents,
        "encoder_hidden_states": randn(1, size.text, config["num_text_layers"], config["text_hidden_dim"]),
        "encoder_attention_mask": mask_of(size.text // 2, size.text, latents.device),
        "timestep": latents.new_tensor([0.5]),
        "position_ids": F.pad(_ids(height, width, latents), (0, 0, size.text, 0)),
    }


def _ovis_image(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    given = _chroma(randn, size, config)
    return given | {"txt_ids": _text_ids(size.text, given["hidden_states"], 3, [1, 2])}


def _longcat_image(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """The picture's positions begin where the text's end."""
    given = _ovis_image(randn, size, config)
    ids = given["img_ids"]
    return given | {"img_ids": ids + ids.new_tensor([1, size.text, size.text])}


def _nucleus_image(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """With no mask: the pipeline gives none where no token is padding."""
    given = _packed(randn, size, config["in_channels"], config["joint_attention_dim"])
    return given | {
        "timestep": given["hidden_states"].new_tensor([0.5]),
        "img_shapes": [(1, size.height // 16, size.width // 16)],
    }


def _qwen_image21(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """A step that neither fills the cache of keys nor uses it. A slot of the picture stands for four tokens."""
    given = _packed(randn, size, config["in_channels"], config["context_in_dim"])
    latents = given["hidden_states"]
    slots = torch.arange(size.text + latents.shape[1] // 4, device=latents.device)
    return given | {
        "timestep": latents.new_tensor([0.5]),
        "img_shapes": [[(1, size.height // 16, size.width // 16)]],
        "img_mask": (slots >= size.text)[None],
    }


# Their text is 1024 tokens that its encoder makes of the picture to edit, and 256 of words.
_JOYIMAGE = {"hidden_size": 4096, "num_attention_heads": 32, "num_layers": 40, "theta": 10000}

PACKED_PICTURES = {
    "flux": KnownModel("FluxTransformer2DModel", Size(1024, 1024), _flux, {"guidance_embeds": True}),
    "flux2": KnownModel("Flux2Transformer2DModel", Size(1024, 1024), _flux2),
    "chroma": KnownModel("ChromaTransformer2DModel", Size(1024, 1024), _chroma),
    "qwen-image": KnownModel("QwenImageTransformer2DModel", Size(1328, 1328, text=256), _qwen_image),
    "bria": KnownModel(
        "BriaTransformer2DModel",
        Size(1024, 1024, text=128),
        _bria,
        {
            "in_channels": 16,
            "num_layers": 8,
            "num_single_layers": 28,
            "attention_head_dim": 96,
            "axes_dims_rope": [0, 48, 48],
        },
    ),
    "fibo": KnownModel(
        "BriaFiboTransformer2DModel", Size(1024, 1024, text=2048), _fibo, {"in_channels": 48, "num_layers": 8}
    ),
    "flux3": KnownModel("Flux3Transformer2DModel", Size(1024, 1024, text=480), _flux3),
    "ideogram4": KnownModel("Ideogram4Transformer2DModel", Size(2048, 2048, text=2048), _ideogram4),
    "joyimage-edit": KnownModel(
        "JoyImageEditTransformer3DModel", Size(1024, 1024, text=1280), _joyimage_edit, _JOYIMAGE
    ),
    "joyimage-edit-plus": KnownModel(
        "JoyImageEditPlusTransformer3DModel", Size(1024, 1024, text=1280), _joyimage_edit_plus, _JOYIMAGE
    ),
    "krea2": KnownModel("Krea2Transformer2DModel", Size(1024, 1024), _krea2),
    "longcat-image": KnownModel(
        "LongCatImageTransformer2DModel",
        Size(1024, 1024),
        _longcat_image,
        {"num_layers": 10, "num_single_layers": 20},
    ),
    "nucleus-image": KnownModel(
        "NucleusMoEImageTransformer2DModel",
        Size(1024, 1024, text=1024),
        _nucleus_image,
        {
            "out_channels": 16,
            "num_layers": 32,
            "num_key_value_heads": 4,
            "joint_attention_dim": 4096,
            "dense_moe_strategy": "leave_first_three_blocks_dense",
            "num_experts": 64,
            "capacity_factors": [0.0] * 3 + [4.0] * 2 + [2.0] * 27,
            "use_grouped_mm": True,
        },
    ),
    "ovis-image": KnownModel("OvisImageTransformer2DModel", Size(1024, 1024, text=256), _ovis_image),
    "qwen-image-2.1": KnownModel("QwenImage21Transformer2DModel", Size(1024, 1024), _qwen_image21, multiple=32),
}
