"""Transformers of their real size, without their weights: what they are built of, and what a step feeds them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import diffusers
import torch
from accelerate import init_empty_weights
from diffusers import ModelMixin
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """Of what is made: pixels, frames of a video, tokens of its text."""

    height: int
    width: int
    frames: int = 1
    text: int = 512


Randn = Callable[..., Tensor]


@dataclass(frozen=True)
class KnownModel:
    """A transformer of diffusers.

    Attributes:
        cls: the name of its class.
        size: what its authors make with it.
        inputs: of one forward: from a source of random numbers in the run's dtype, the size and the config.
        config: where the published model differs from the defaults of its class.
        multiple: pixels to a token, along each side.
        frames_apart: of a video, after the first: those that its VAE takes for one.
        text: the argument that is the text, [..., tokens, channels].
    """

    cls: str
    size: Size
    inputs: Callable[[Randn, Size, Mapping[str, Any]], dict[str, Any]]
    config: dict[str, Any] = field(default_factory=dict)
    multiple: int = 16
    frames_apart: int = 4
    text: str = "encoder_hidden_states"

    def sized(self, resolution: int | None, frames: int | None, text: int | None) -> Size:
        """Another size of the same shape; the resolution is the height.

        Raises:
            ValueError: no whole number of tokens, or of latents of frames; frames of what makes pictures.
        """
        if frames is not None and frames > 1 and self.size.frames == 1:
            raise ValueError(f"{frames} frames: a {self.cls} makes pictures")
        if resolution is not None and resolution % self.multiple:
            raise ValueError(f"a height of {resolution} is no multiple of {self.multiple}, the pixels to a token")
        if frames is not None and (over := (frames - 1) % self.frames_apart):
            fewer = frames - over
            raise ValueError(f"{frames} frames: a {self.cls} makes {fewer} or {fewer + self.frames_apart}")
        size = self.size
        if resolution is not None:
            across = round(resolution * size.width / size.height / self.multiple)
            size = replace(size, height=resolution, width=max(across, 1) * self.multiple)
        return replace(size, frames=frames or size.frames, text=text or size.text)


def _ids(height: int, width: int, like: Tensor, dims: int = 3) -> Tensor:
    """Positions of packed latents: [height * width, dims], the last but one dim that of the row for dims = 3."""
    ids = torch.zeros(height, width, dims, device=like.device, dtype=like.dtype)
    ids[..., 1] += torch.arange(height, device=like.device)[:, None]
    ids[..., 2] += torch.arange(width, device=like.device)[None]
    return ids.reshape(-1, dims)


def _packed(randn: Randn, size: Size, channels: int, text: int) -> dict[str, Any]:
    """Latents in one row, 16 pixels to a token, and text."""
    return {
        "hidden_states": randn(1, size.height // 16 * (size.width // 16), channels),
        "encoder_hidden_states": randn(1, size.text, text),
    }


def _flux(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    given = _packed(randn, size, config["in_channels"], config["joint_attention_dim"])
    like = given["hidden_states"]
    if config["guidance_embeds"]:
        given["guidance"] = torch.tensor([4.0], device=like.device)  # exact in bf16 after the model's factor of 1000
    return given | {
        "pooled_projections": randn(1, config["pooled_projection_dim"]),
        "timestep": torch.tensor([0.5], device=like.device, dtype=like.dtype),
        "img_ids": _ids(size.height // 16, size.width // 16, like),
        "txt_ids": like.new_zeros(size.text, 3),
    }


def _chroma(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    given = _packed(randn, size, config["in_channels"], config["joint_attention_dim"])
    like = given["hidden_states"]
    return given | {
        "timestep": torch.tensor([0.5], device=like.device, dtype=like.dtype),
        "img_ids": _ids(size.height // 16, size.width // 16, like),
        "txt_ids": like.new_zeros(size.text, 3),
    }


def _flux2(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    given = _packed(randn, size, config["in_channels"], config["joint_attention_dim"])
    like = given["hidden_states"]
    text = like.new_zeros(1, size.text, 4)
    text[..., 3] += torch.arange(size.text, device=like.device)
    return given | {
        "timestep": torch.tensor([0.5], device=like.device, dtype=like.dtype),
        "guidance": torch.tensor([4.0], device=like.device, dtype=like.dtype),
        "img_ids": _ids(size.height // 16, size.width // 16, like, 4)[None],
        "txt_ids": text,
    }


def _qwen_image(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """With no mask: the pipeline gives none for a single prompt."""
    given = _packed(randn, size, config["in_channels"], config["joint_attention_dim"])
    like = given["hidden_states"]
    return given | {
        "timestep": torch.tensor([0.5], device=like.device, dtype=like.dtype),
        "img_shapes": [[(1, size.height // 16, size.width // 16)]],
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
    latents = randn(1, config["in_channels"], size.height // 8, size.width // 8)
    return {
        "hidden_states": latents,
        "encoder_hidden_states": randn(1, size.text, config["cap_feat_dim"]),
        "encoder_attention_mask": torch.ones(1, size.text, device=latents.device, dtype=torch.bool),
        "timestep": torch.tensor([0.5], device=latents.device, dtype=latents.dtype),
    }


def _video(randn: Randn, size: Size, channels: int, text: int, frames: int = 4) -> dict[str, Any]:
    """Latents of a VAE that takes 8 pixels and so many frames for one, and text."""
    latents = randn(1, channels, (size.frames - 1) // frames + 1, size.height // 8, size.width // 8)
    return {
        "hidden_states": latents,
        "encoder_hidden_states": randn(1, size.text, text),
        "timestep": torch.tensor([500], device=latents.device),
    }


def _hunyuan_video(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """Half of the text is padding."""
    given = _video(randn, size, config["in_channels"], config["text_embed_dim"])
    like = given["hidden_states"]
    mask = torch.zeros(1, size.text, device=like.device, dtype=torch.bool)
    mask[:, : size.text // 2] = True
    return given | {
        "encoder_attention_mask": mask,
        "pooled_projections": randn(1, config["pooled_projection_dim"]),
        "guidance": torch.tensor([6000.0], device=like.device, dtype=like.dtype),
    }


def _wan(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    return _video(randn, size, config["in_channels"], config["text_dim"])


def _mochi(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    given = _video(randn, size, config["in_channels"], config["text_embed_dim"], 6)
    mask = torch.ones(1, size.text, device=given["timestep"].device, dtype=torch.bool)
    return given | {"encoder_attention_mask": mask}


def _cogvideox(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    """Frames before channels; positions by random angles."""
    given = _video(randn, size, config["in_channels"], config["text_embed_dim"])
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
        "encoder_attention_mask": torch.ones(1, size.text, device=latents.device, dtype=torch.bool),
        "timestep": torch.tensor([500], device=latents.device),
        "num_frames": frames,
        "height": height,
        "width": width,
        "rope_interpolation_scale": (8 / 25, 32, 32),
    }


def _sd3(randn: Randn, size: Size, config: Mapping[str, Any]) -> dict[str, Any]:
    latents = randn(1, config["in_channels"], size.height // 8, size.width // 8)
    return {
        "hidden_states": latents,
        "encoder_hidden_states": randn(1, size.text, config["joint_attention_dim"]),
        "pooled_projections": randn(1, config["pooled_projection_dim"]),
        "timestep": torch.tensor([500], device=latents.device),
    }


KNOWN_MODELS = {
    "flux": KnownModel("FluxTransformer2DModel", Size(1024, 1024), _flux, {"guidance_embeds": True}),
    "flux2": KnownModel("Flux2Transformer2DModel", Size(1024, 1024), _flux2),
    "chroma": KnownModel("ChromaTransformer2DModel", Size(1024, 1024), _chroma),
    "qwen-image": KnownModel("QwenImageTransformer2DModel", Size(1328, 1328, text=256), _qwen_image),
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
    "hunyuan-video": KnownModel("HunyuanVideoTransformer3DModel", Size(720, 1280, 129, 256), _hunyuan_video),
    "wan": KnownModel("WanTransformer3DModel", Size(480, 832, 81), _wan),
    "mochi": KnownModel("MochiTransformer3DModel", Size(480, 848, 163, 256), _mochi, frames_apart=6),
    "cogvideox": KnownModel(
        "CogVideoXTransformer3DModel",
        Size(480, 720, 49, 226),
        _cogvideox,
        {"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True},
    ),
    "ltx": KnownModel("LTXVideoTransformer3DModel", Size(512, 704, 161, 128), _ltx, multiple=32, frames_apart=8),
}


def cannot_be_had(name: str, config: Mapping[str, Any], error: Exception) -> ValueError:
    """A class that fails with the config of somebody's folder."""
    shown = ", ".join(f"{key}={value!r}" for key, value in config.items() if not key.startswith("_"))
    why = str(error).strip().partition("\n")[0]
    return ValueError(f"{name} cannot be had with {shown}: {type(error).__name__}{why and f': {why}'}")


def made(known: KnownModel, config: Mapping[str, Any]) -> ModelMixin:
    """The model without its weights. Raises ValueError where its class takes no such config, or makes no blocks."""
    try:
        numbers = {name: value for name, value in config.items() if isinstance(value, int)}
        if any(name.startswith("num_") and value < 0 for name, value in numbers.items()):
            raise ValueError("fewer than none")
        if any("heads" in name and value == 0 for name, value in numbers.items()):
            raise ValueError("no heads are left")
        with init_empty_weights(include_buffers=False):
            model = getattr(diffusers, known.cls)(**{**known.config, **config}).eval()
        if count_blocks(model) == 0:
            raise ValueError("no blocks are left")
        return model
    except (TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        raise cannot_be_had(known.cls, config, error) from error


_NORMS_OF_ATTENTION = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")


@torch.no_grad()
def build(known: KnownModel, config: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> ModelMixin:
    """The model with random weights that are equal on every rank, made on the device itself.

    Weights keep the scale of what goes through them, and queries find some keys and not others: where attention is
    nearly even, its output is nearly nothing, and nobody sees that half of the keys are missing.

    Args:
        config: what is to differ from the published model.

    Raises:
        ValueError: a config that its class does not take.
    """
    model = made(known, config)
    kept = kept_in_float32(model)
    generator = torch.Generator(device=device).manual_seed(0)
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            kept_dtype = torch.float32 if f"{path}.{name}".removeprefix(".") in kept else dtype
            x = torch.empty(parameter.shape, dtype=kept_dtype, device=device)
            if x.ndim > 1:
                x.normal_(0, x[0].numel() ** -0.5, generator=generator)
            elif "norm" in path and name == "weight":
                x.fill_(2 if path.endswith(_NORMS_OF_ATTENTION) else 1)
            else:
                x.normal_(0, 0.01, generator=generator)
            module._parameters[name] = nn.Parameter(x, requires_grad=False)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    return model


def kept_in_float32(model: ModelMixin) -> set[str]:
    """Names of the parameters that `from_pretrained` leaves in float32, whatever dtype it is asked for."""
    parts = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return {name for name, _ in model.named_parameters() if parts & set(name.split("."))}


def count_blocks(model: ModelMixin) -> int:
    """How many there are one after another; classes name theirs in one of two places, or in both."""
    names = {*(model._repeated_blocks or ()), *(model._no_split_modules or ())}
    return sum(type(module).__name__ in names for module in model.modules())


def inputs(known: KnownModel, size: Size, model: ModelMixin, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments of a forward, equal on every rank."""
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    return {**known.inputs(randn, size, model.config), "return_dict": False}
