"""What is planned for: a pipeline's transformer, text encoders and VAE, by their configs alone."""

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..benchmarks.known_models import KNOWN_MODELS, KnownModel, Size
from ..pipelines.model_folder import ModelFolder


Part = tuple[str, Mapping[str, Any]]  # a class, and its config or what it has otherwise than its class


@dataclass(frozen=True)
class VAE:
    """Of diffusers.

    Attributes:
        config: of which its latents have `channels`, whatever their name there.
        space, time: pixels along each side, and frames, to a latent; a VAE without `time` is one of pictures.
    """

    cls: str
    channels: int
    config: Mapping[str, Any] = field(default_factory=dict)
    space: int = 8
    time: int | None = None


@dataclass(frozen=True)
class Subject:
    """A pipeline.

    Attributes:
        known: what its transformer is given.
        config: its transformer's, where it differs from the known one.
        forwards: of a step: two with classifier-free guidance.
        encoders: name -> a text encoder of transformers.
    """

    name: str
    known: KnownModel
    size: Size
    config: Mapping[str, Any] = field(default_factory=dict)
    forwards: int = 1
    encoders: Mapping[str, Part] = field(default_factory=dict)
    vae: VAE | None = None


_CLIP_L = {"vocab_size": 49408, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
_CLIP_G = _CLIP_L | {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32}
_T5 = {"d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_heads": 64, "num_layers": 24, "vocab_size": 32128}
_T5_XXL: Part = ("T5EncoderModel", _T5 | {"feed_forward_proj": "gated-gelu"})
_UMT5_XXL: Part = ("UMT5EncoderModel", _T5 | {"vocab_size": 256384, "feed_forward_proj": "gated-gelu"})
_LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128320,
}  # fmt: skip
_QWEN_7B = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064,
}  # fmt: skip
_MISTRAL_24B = {
    "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
}  # fmt: skip
_KL = VAE("AutoencoderKL", 16, {
    "block_out_channels": [128, 256, 512, 512], "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4, "layers_per_block": 2, "latent_channels": 16, "sample_size": 1024,
})  # fmt: skip
_FLUX_ENCODERS = {"text_encoder": ("CLIPTextModel", _CLIP_L | {"num_attention_heads": 12}), "text_encoder_2": _T5_XXL}


def _known(name: str, key: str, **of_pipeline: Any) -> Subject:
    return Subject(name, KNOWN_MODELS[key], KNOWN_MODELS[key].size, **of_pipeline)


# The configs that the Hub has of these, as far as they differ from those of their classes.
SUBJECTS = {
    "flux": _known("black-forest-labs/FLUX.1-dev", "flux", encoders=_FLUX_ENCODERS, vae=_KL),
    "flux-schnell": _known(
        "black-forest-labs/FLUX.1-schnell",
        "flux",
        config={"guidance_embeds": False},
        encoders=_FLUX_ENCODERS,
        vae=_KL,
    ),
    "flux2": _known(
        "black-forest-labs/FLUX.2-dev",
        "flux2",
        encoders={"text_encoder": ("Mistral3ForConditionalGeneration", {"text_config": _MISTRAL_24B})},
        vae=VAE("AutoencoderKLFlux2", 32),
    ),
    "chroma": _known("lodestones/Chroma1-HD", "chroma", forwards=2, encoders={"text_encoder": _T5_XXL}, vae=_KL),
    "qwen-image": _known(
        "Qwen/Qwen-Image",
        "qwen-image",
        forwards=2,
        encoders={"text_encoder": ("Qwen2_5_VLForConditionalGeneration", {"text_config": _QWEN_7B})},
        vae=VAE("AutoencoderKLQwenImage", 16, time=1),
    ),
    "sd3.5-large": _known(
        "stabilityai/stable-diffusion-3.5-large",
        "sd3.5-large",
        forwards=2,
        encoders={
            "text_encoder": ("CLIPTextModelWithProjection", _CLIP_L | {"num_attention_heads": 12}),
            "text_encoder_2": ("CLIPTextModelWithProjection", _CLIP_G | {"num_attention_heads": 20}),
            "text_encoder_3": _T5_XXL,
        },
        vae=_KL,
    ),
    "hunyuan-video": _known(
        "hunyuanvideo-community/HunyuanVideo",
        "hunyuan-video",
        encoders={
            "text_encoder": ("LlamaModel", _LLAMA_8B),
            "text_encoder_2": ("CLIPTextModel", _CLIP_L | {"num_attention_heads": 12}),
        },
        vae=VAE("AutoencoderKLHunyuanVideo", 16, time=4),
    ),
    "wan": _known(
        "Wan-AI/Wan2.1-T2V-14B-Diffusers",
        "wan",
        forwards=2,
        encoders={"text_encoder": _UMT5_XXL},
        vae=VAE("AutoencoderKLWan", 16, time=4),
    ),
    "wan-1.3b": _known(
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        "wan",
        config={"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
        forwards=2,
        encoders={"text_encoder": _UMT5_XXL},
        vae=VAE("AutoencoderKLWan", 16, time=4),
    ),
    "ltx": _known(
        "Lightricks/LTX-Video",
        "ltx",
        forwards=2,
        encoders={"text_encoder": _T5_XXL},
        vae=VAE("AutoencoderKLLTXVideo", 128, space=32, time=8),
    ),
}


def known_subject(model: str) -> Subject | None:
    """The one of this short name or id on the Hub."""
    return next((each for short, each in SUBJECTS.items() if model.lower() in (short, each.name.lower())), None)


def open_folder(model: str, names: Collection[str] = SUBJECTS) -> ModelFolder:
    """Of a model without a short name, of which there are `names`.

    Raises:
        ValueError: there is no pipeline there.
    """
    if "/" not in model and not Path(model).exists():
        near = difflib.get_close_matches(model, names, 5)
        those = f"short names like it are {', '.join(near)}" if near else f"short names are {', '.join(names)}"
        raise ValueError(f"{model}: there is no such folder, and ids on the Hub are OWNER/NAME; {those}")
    return ModelFolder(model)


def find_subject(model: str) -> Subject:
    """A pipeline that is known by a short name or its id on the Hub; else one in a folder, or on the Hub if online.

    Raises:
        ValueError: there is no such pipeline, or one whose transformer is not among the known classes.
    """
    if (subject := known_subject(model)) is not None:
        return subject
    folder = open_folder(model)
    for each in SUBJECTS.values():
        if each.known.cls == folder.denoiser_class:
            break
    else:
        classes = ", ".join(dict.fromkeys(each.known.cls for each in SUBJECTS.values()))
        raise ValueError(f"{model}: what its {folder.denoiser_class} is given is not known here, only of {classes}")
    encoders, config, vae = folder.text_encoders(), folder.denoiser_config(), None
    if each.vae is not None and folder.vae_class == each.vae.cls:
        of_vae = folder.config("vae")
        vae = replace(each.vae, config=of_vae, channels=of_vae.get("latent_channels", each.vae.channels))
    config = {key: value for key, value in config.items() if not key.startswith("_")}
    return Subject(model, each.known, each.size, config, each.forwards, encoders, vae)
