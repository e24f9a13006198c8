"""Tiny pipelines that need no file: random transformers, embeddings for text encoders, latents for pictures."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import diffusers
import torch
from diffusers import (
    CogVideoXDDIMScheduler,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2Pipeline,
    FluxPipeline,
    HunyuanVideoPipeline,
    LTXPipeline,
    LTXVideoTransformer3DModel,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
    QwenImagePipeline,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    UniPCMultistepScheduler,
    WanPipeline,
    ZImagePipeline,
)

from ..models.testing_utils.common import randn
from ..models.transformers.test_models_transformer_flux import FluxTransformerTesterConfig
from ..models.transformers.test_models_transformer_flux2 import Flux2TransformerTesterConfig
from ..models.transformers.test_models_transformer_hunyuan_video import HunyuanVideoTransformerTesterConfig
from ..models.transformers.test_models_transformer_qwenimage import QwenImageTransformerTesterConfig
from ..models.transformers.test_models_transformer_wan import WanTransformerTesterConfig
from ..models.transformers.test_models_transformer_z_image import ZImageTransformerTesterConfig


def with_random_weights(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1 / parameter[0].numel() ** 0.5, generator=generator)
            elif "norm" in name and name.endswith("weight"):
                parameter.normal_(1, 0.1, generator=generator)
            else:
                parameter.normal_(0, 0.1, generator=generator)
    return model.eval()


def flux() -> FluxPipeline:
    scheduler = FlowMatchEulerDiscreteScheduler()
    model = FluxTransformerTesterConfig().get_model()
    return FluxPipeline(scheduler, None, None, None, None, None, model)


def flux_call(prompts: int = 1) -> dict:
    return {
        "prompt_embeds": randn(prompts, 11, 32, seed=1),
        "pooled_prompt_embeds": randn(prompts, 24, seed=2),
        "negative_prompt_embeds": randn(prompts, 11, 32, seed=3),
        "negative_pooled_prompt_embeds": randn(prompts, 24, seed=4),
        "true_cfg_scale": 4.0,
        "height": 80,
        "width": 112,
    }


def wan() -> WanPipeline:
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    model = WanTransformerTesterConfig().get_model()
    return WanPipeline(None, None, None, scheduler, model)


def wan22() -> WanPipeline:
    """Two transformers, one for the noisy steps."""
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    config = WanTransformerTesterConfig()
    first, second = config.get_model(seed=0), config.get_model(seed=1)
    return WanPipeline(None, None, None, scheduler, first, transformer_2=second, boundary_ratio=0.6)


def wan_call(prompts: int = 1) -> dict:
    return {
        "prompt_embeds": randn(prompts, 11, 16, seed=1),
        "negative_prompt_embeds": randn(prompts, 9, 16, seed=3),
        "guidance_scale": 5.0,
        "height": 48,
        "width": 80,
        "num_frames": 9,
    }


def qwenimage() -> QwenImagePipeline:
    model = QwenImageTransformerTesterConfig().get_model()
    return QwenImagePipeline(FlowMatchEulerDiscreteScheduler(), None, None, None, model)


def qwenimage_call(prompts: int = 1) -> dict:
    width = QwenImageTransformerTesterConfig().get_init_dict()["joint_attention_dim"]
    return {
        "prompt_embeds": randn(prompts, 11, width, seed=1),
        "prompt_embeds_mask": torch.ones(prompts, 11, dtype=torch.long),
        "negative_prompt_embeds": randn(prompts, 6, width, seed=3),
        "negative_prompt_embeds_mask": torch.ones(prompts, 6, dtype=torch.long),
        "true_cfg_scale": 4.0,
        "height": 64,
        "width": 96,
    }


def sd3() -> StableDiffusion3Pipeline:
    model = SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=24, out_channels=4,
    )  # fmt: skip
    nothing = [None] * 6
    return StableDiffusion3Pipeline(with_random_weights(model), FlowMatchEulerDiscreteScheduler(), None, *nothing)


def sd3_call(prompts: int = 1) -> dict:
    return {
        "prompt_embeds": randn(prompts, 11, 32, seed=1),
        "pooled_prompt_embeds": randn(prompts, 24, seed=2),
        "negative_prompt_embeds": randn(prompts, 11, 32, seed=3),
        "negative_pooled_prompt_embeds": randn(prompts, 24, seed=4),
        "guidance_scale": 7.0,
        "height": 64,
        "width": 64,
    }


def ltx() -> LTXPipeline:
    model = LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=4, attention_head_dim=8, cross_attention_dim=32,
        num_layers=2, caption_channels=16,
    )  # fmt: skip
    return LTXPipeline(FlowMatchEulerDiscreteScheduler(), None, None, None, with_random_weights(model))


def ltx_call(prompts: int = 1) -> dict:
    return {
        "prompt_embeds": randn(prompts, 11, 16, seed=1),
        "prompt_attention_mask": torch.ones(prompts, 11),
        "negative_prompt_embeds": randn(prompts, 11, 16, seed=3),
        "negative_prompt_attention_mask": (torch.arange(11)[None] < 5).float().repeat(prompts, 1),
        "guidance_scale": 3.0,
        "height": 64,
        "width": 96,
        "num_frames": 9,
    }


def cogvideox() -> CogVideoXPipeline:
    model = CogVideoXTransformer3DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=4, time_embed_dim=8,
        text_embed_dim=32, num_layers=2, sample_width=8, sample_height=8, sample_frames=9, patch_size=2,
        temporal_compression_ratio=4, max_text_seq_length=11,
    )  # fmt: skip
    return CogVideoXPipeline(None, None, None, with_random_weights(model), CogVideoXDDIMScheduler())


def cogvideox_call(prompts: int = 1) -> dict:
    return {
        "prompt_embeds": randn(prompts, 11, 32, seed=1),
        "negative_prompt_embeds": randn(prompts, 11, 32, seed=3),
        "guidance_scale": 6.0,
        "height": 64,
        "width": 64,
        "num_frames": 9,
        "max_sequence_length": 11,
    }


def flux2() -> Flux2Pipeline:
    model = Flux2TransformerTesterConfig().get_model()
    return Flux2Pipeline(FlowMatchEulerDiscreteScheduler(), None, None, None, model)


def flux2_call(prompts: int = 1) -> dict:
    return {"prompt_embeds": randn(prompts, 11, 32, seed=1), "height": 80, "width": 112}


def hunyuan_video() -> HunyuanVideoPipeline:
    model = HunyuanVideoTransformerTesterConfig().get_model()
    return HunyuanVideoPipeline(None, None, model, None, FlowMatchEulerDiscreteScheduler(), None, None)


def hunyuan_video_call(prompts: int = 1) -> dict:
    return {
        "prompt_embeds": randn(prompts, 11, 16, seed=1),
        "pooled_prompt_embeds": randn(prompts, 8, seed=2),
        "prompt_attention_mask": (torch.arange(11)[None] < 5).long().repeat(prompts, 1),
        "height": 48,
        "width": 80,
        "num_frames": 9,
    }


def pixart() -> PixArtSigmaPipeline:
    model = PixArtTransformer2DModel(
        num_attention_heads=5, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, sample_size=10,
        cross_attention_dim=40, caption_channels=16, use_additional_conditions=False,
    )  # fmt: skip
    return PixArtSigmaPipeline(None, None, None, with_random_weights(model), DPMSolverMultistepScheduler())


def pixart_call(prompts: int = 1) -> dict:
    return {
        "prompt": None,
        "negative_prompt": None,
        "prompt_embeds": randn(prompts, 11, 16, seed=1),
        "prompt_attention_mask": torch.ones(prompts, 11),
        "negative_prompt_embeds": randn(prompts, 11, 16, seed=3),
        "negative_prompt_attention_mask": (torch.arange(11)[None] < 5).float().repeat(prompts, 1),
        "height": 80,
        "width": 112,
        "use_resolution_binning": False,
    }


def z_image() -> ZImagePipeline:
    model = ZImageTransformerTesterConfig().get_model()
    return ZImagePipeline(FlowMatchEulerDiscreteScheduler(), None, None, None, model)


def z_image_call(prompts: int = 1) -> dict:
    """Samples in lists, texts of several lengths."""
    return {
        "prompt_embeds": [randn(21 + each, 24, seed=each) for each in range(prompts)],
        "negative_prompt_embeds": [randn(9 - each, 24, seed=10 + each) for each in range(prompts)],
        "guidance_scale": 4.0,
        "height": 80,
        "width": 112,
    }


def ideogram4() -> DiffusionPipeline:
    """A transformer for each branch."""
    config = Ideogram4TransformerTesterConfig()
    first, second = config.get_model(seed=0), config.get_model(seed=1)
    pipe = diffusers.Ideogram4Pipeline(FlowMatchEulerDiscreteScheduler(), None, None, None, first, second)

    def encode_prompt(prompt: list[str], grid_h: int, grid_w: int, max_sequence_length: int, device: torch.device):
        words, image = max_sequence_length, grid_h * grid_w
        places = torch.arange(words)[:, None].expand(-1, 3)
        grid = 65536 + torch.cartesian_prod(torch.arange(1), torch.arange(grid_h), torch.arange(grid_w))
        indicator = torch.tensor([3] * words + [2] * image)
        every = [torch.cat([places, grid]), torch.ones(words + image, dtype=torch.long), indicator]
        features = randn(len(prompt), words + image, config.get_init_dict()["llm_features_dim"], seed=1)
        return features, *(x.expand(len(prompt), *x.shape) for x in every)

    pipe.encode_prompt = encode_prompt
    return pipe


def ideogram4_call(prompts: int = 1) -> dict:
    schedule = {"guidance_schedule": None, "guidance_scale": 5.0}
    return {"prompt": ["one"] * prompts, "height": 80, "width": 48, "max_sequence_length": 10, **schedule}


@dataclass(frozen=True)
class TinyPipeline:
    """A pipeline, the arguments of a call, and how it computes the branches of guidance, if it has any."""

    build: Callable[[], DiffusionPipeline]
    call: Callable[..., dict[str, Any]]
    guidance: Literal["two calls", "stacked"] | None


PIPELINES = {
    "flux": TinyPipeline(flux, flux_call, "two calls"),
    "wan": TinyPipeline(wan, wan_call, "two calls"),
    "wan22": TinyPipeline(wan22, wan_call, "two calls"),
    "qwenimage": TinyPipeline(qwenimage, qwenimage_call, "two calls"),
    "sd3": TinyPipeline(sd3, sd3_call, "stacked"),
    "ltx": TinyPipeline(ltx, ltx_call, "stacked"),
    "cogvideox": TinyPipeline(cogvideox, cogvideox_call, "stacked"),
    "pixart": TinyPipeline(pixart, pixart_call, "stacked"),
    "z_image": TinyPipeline(z_image, z_image_call, "stacked"),
    "flux2": TinyPipeline(flux2, flux2_call, None),
    "hunyuan_video": TinyPipeline(hunyuan_video, hunyuan_video_call, None),
}
if hasattr(diffusers, "Ideogram4Pipeline"):
    from ..models.transformers.test_models_transformer_ideogram4 import Ideogram4TransformerTesterConfig

    PIPELINES["ideogram4"] = TinyPipeline(ideogram4, ideogram4_call, "two calls")


def build(name: str) -> DiffusionPipeline:
    pipe = PIPELINES[name].build()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def latents(pipe: DiffusionPipeline, arguments: dict, seed: int | None = 0, steps: int = 3, **changes) -> torch.Tensor:
    """What the whole loop arrives at."""
    if seed is not None:
        changes = {"generator": torch.Generator().manual_seed(seed), **changes}
    call = {"num_inference_steps": steps, "output_type": "latent", "return_dict": False, **arguments, **changes}
    return pipe(**call)[0]
