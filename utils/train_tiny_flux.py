"""Trains the tiny FLUX checkpoint that the library carries: a complete `FluxPipeline` folder of a few megabytes.

Everything is made here: the pictures (drawn by Pillow), both tokenizers, both text encoders, the autoencoder and the
transformer. The folder is written, read again, and judged on prompts whose combination was never trained on.

    python utils/train_tiny_flux.py --out diffusers_rocm/assets/tiny-flux-shapes --device cuda
    python utils/train_tiny_flux.py --out /tmp/tiny-flux --device cpu --quick    # a dry run of about a minute
"""

import argparse
import json
import math
import os
import platform
import random
import time
from pathlib import Path

import diffusers
import torch
import torch.nn.functional as F
import transformers
from check_shapes import BACKGROUNDS, COLOURS, SHAPES, SIDE, SIZES, held_out_prompts, matches, training_prompts
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from PIL import Image
from tiny_flux_data import draw_all, make_clip_tokenizer, make_t5_tokenizer
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel


TEXT_LENGTH = 16  # enough for every prompt; longer texts are only more padding
LONGEST_TEXT = 512  # FluxPipeline's default, and its limit
SHIFT = 2.0  # more of the denoising steps go to high noise, where a picture's layout is decided
EMPTY_PROMPTS = 0.1
LICENCE = """MIT License

Copyright (c) 2026 The diffusers_rocm authors

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit
persons to whom the Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""


def learning_rate(step: int, steps: int) -> float:
    """A short rise, then half a cosine down to zero: by steps alone, so that a run can be repeated."""
    return 2e-3 * min((step + 1) / 200, 1.0) * 0.5 * (1 + math.cos(math.pi * step / steps))


def to_unit(pictures: Tensor) -> Tensor:
    return pictures.float() / 127.5 - 1


def make_pipeline() -> FluxPipeline:
    tokenizer, tokenizer_2 = make_clip_tokenizer(), make_t5_tokenizer()
    text_encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            projection_dim=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=tokenizer.model_max_length,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    text_encoder_2 = T5EncoderModel(
        T5Config(
            vocab_size=len(tokenizer_2),
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            is_encoder_decoder=False,
            use_cache=False,
        )
    )
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(32, 64, 64),
        layers_per_block=1,
        norm_num_groups=8,
        latent_channels=8,
        sample_size=SIDE,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    transformer = FluxTransformer2DModel(
        in_channels=4 * vae.config.latent_channels,
        num_layers=2,
        num_single_layers=4,
        num_attention_heads=8,
        attention_head_dim=16,
        axes_dims_rope=(4, 6, 6),
        joint_attention_dim=64,
        pooled_projection_dim=64,
        guidance_embeds=False,
    )
    # Blocks that start as the identity train faster.
    for block in transformer.transformer_blocks:
        for layer in (block.norm1.linear, block.norm1_context.linear):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
    for layer in (*(block.norm.linear for block in transformer.single_transformer_blocks), transformer.proj_out):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT, use_dynamic_shifting=False),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        text_encoder_2=text_encoder_2,
        tokenizer_2=tokenizer_2,
        transformer=transformer,
    )


def train_autoencoder(vae: AutoencoderKL, pictures: Tensor, steps: int, batch: int, autocast: torch.autocast):
    """Reconstruction with a little KL: the noise of the latents teaches the decoder to forgive small errors."""
    device = pictures.device
    generator = torch.Generator(device).manual_seed(1)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=1e-3)
    begin = time.monotonic()
    for step in range(steps):
        chosen = torch.randint(len(pictures), (batch,), device=device, generator=generator)
        images = to_unit(pictures[chosen])
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        with autocast:
            posterior = vae.encode(images).latent_dist
            mean, logvar = posterior.mean.float(), posterior.logvar.float()
            noise = torch.randn(mean.shape, device=device, generator=generator)
            images_again = vae.decode(mean + noise * torch.exp(0.5 * logvar)).sample.float()
        error = F.l1_loss(images_again, images)
        kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        loss = error + F.mse_loss(images_again, images) + 5e-4 * kl
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            errors = f"l1 {error.item():.4f}, kl {kl.item():.2f}"
            print(f"autoencoder step {step}: {errors}, {time.monotonic() - begin:.0f} s", flush=True)


@torch.no_grad()
def encode_all(vae: AutoencoderKL, pictures: Tensor, autocast: torch.autocast) -> Tensor:
    """Packed latents of every picture, normalised; the autoencoder's shift and scale are set to what was measured."""
    latents = []
    for chunk in pictures.flatten(0, 1).split(128):
        with autocast:
            latents.append(vae.encode(to_unit(chunk)).latent_dist.mean.float())
    stacked = torch.cat(latents)
    shift, scale = round(stacked.mean().item(), 4), round(1 / stacked.std().item(), 4)
    vae.register_to_config(shift_factor=shift, scaling_factor=scale)
    count, channels, height, width = stacked.shape
    packed = FluxPipeline._pack_latents((stacked - shift) * scale, count, channels, height, width)
    return packed.unflatten(0, pictures.shape[:2])


class Painter(nn.Module):
    """What is trained together: both text encoders and the transformer."""

    def __init__(self, pipe: FluxPipeline):
        super().__init__()
        self.text_encoder, self.text_encoder_2 = pipe.text_encoder, pipe.text_encoder_2
        self.transformer = pipe.transformer
        side = SIDE // pipe.vae_scale_factor // 2
        self.register_buffer("img_ids", pipe._prepare_latent_image_ids(1, side, side, "cpu", torch.float32))

    def forward(self, noisy: Tensor, sigma: Tensor, clip_ids: Tensor, t5_ids: Tensor) -> Tensor:
        text = self.text_encoder_2(t5_ids)[0]
        return self.transformer(
            hidden_states=noisy,
            timestep=sigma,
            pooled_projections=self.text_encoder(clip_ids).pooler_output,
            encoder_hidden_states=text,
            txt_ids=text.new_zeros(text.shape[1], 3),
            img_ids=self.img_ids,
            return_dict=False,
        )[0]


def train_painter(
    pipe: FluxPipeline,
    prompts: list[str],
    latents: Tensor,
    steps: int,
    batch: int,
    seed: int,
    autocast: torch.autocast,
    compiled: bool,
):
    """Flow matching; the averaged weights are left in the pipeline."""
    device = latents.device
    painter = Painter(pipe).to(device)
    # Under autocast the transformer would round the timesteps to bfloat16; with float32 tokens it does not.
    hook = pipe.transformer.x_embedder.register_forward_hook(lambda module, inputs, output: output.float())
    short_painter = torch.compile(painter) if compiled else painter

    texts = [*prompts, ""]
    clip_ids = pipe.tokenizer(texts, padding="max_length", max_length=TEXT_LENGTH, return_tensors="pt").input_ids.to(
        device
    )
    t5_ids = pipe.tokenizer_2(texts, padding="max_length", max_length=TEXT_LENGTH, return_tensors="pt").input_ids.to(
        device
    )

    parameters = list(painter.parameters())
    averages = [parameter.detach().clone() for parameter in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    generator = torch.Generator(device).manual_seed(seed)
    lengths = random.Random(seed)
    image_tokens = latents.shape[2]
    begin = time.monotonic()
    for step in range(steps):
        # The text has no attention mask in FLUX: a part of the batches is padded further, so that padding is harmless.
        length = TEXT_LENGTH
        if step % 6 == 5:
            length = round(TEXT_LENGTH * (LONGEST_TEXT / TEXT_LENGTH) ** lengths.random())
        size = batch * (image_tokens + TEXT_LENGTH) // (image_tokens + length)
        which = torch.randint(len(prompts), (size,), device=device, generator=generator)
        drawing = torch.randint(latents.shape[1], (size,), device=device, generator=generator)
        clean = latents[which, drawing]
        noise = torch.randn(clean.shape, device=device, generator=generator)
        even = torch.rand(size, device=device, generator=generator)
        sigma = SHIFT * even / (1 + (SHIFT - 1) * even)  # spread as the scheduler spreads its steps
        noisy = torch.lerp(clean, noise, sigma[:, None, None])
        empty = torch.rand(size, device=device, generator=generator) < EMPTY_PROMPTS
        which = which.masked_fill(empty, len(prompts))

        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        with autocast:
            model = short_painter if length == TEXT_LENGTH else painter
            velocity = model(noisy, sigma, clip_ids[which], F.pad(t5_ids[which], (0, length - TEXT_LENGTH)))
        loss = F.mse_loss(velocity.float(), noise - clean)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(averages, parameters, 1 - min(0.999, (1 + step) / (10 + step)))
        if step % 400 == 0:
            print(f"painter step {step}: loss {loss.item():.4f}, {time.monotonic() - begin:.0f} s", flush=True)
    hook.remove()
    with torch.no_grad():
        for parameter, average in zip(parameters, averages, strict=True):
            parameter.copy_(average)


def save(pipe: FluxPipeline, folder: Path):
    """Half precision halves the folder, and diffusers reads it as float32 again if no dtype is asked for.

    transformers would keep half precision, which does not fit the others: the text encoders stay in float32.
    """
    pipe.transformer.half()
    pipe.vae.half()
    pipe.save_pretrained(folder)
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o644)
    # The names that FLUX folders use, and the files that older versions of transformers ask for.
    index = json.loads((folder / "model_index.json").read_text())
    index["tokenizer_2"] = ["transformers", "T5TokenizerFast"]
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    bpe = json.loads((folder / "tokenizer" / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer" / "vocab.json").write_text(json.dumps(bpe["vocab"], ensure_ascii=False) + "\n")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in bpe["merges"]]
    (folder / "tokenizer" / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")


def paint(
    pipe: FluxPipeline, prompts: list[str], steps: int = 20, length: int = TEXT_LENGTH, seed: int = 0
) -> list[Image.Image]:
    """One picture for each prompt; its noise depends on the seed and the prompt's place alone."""
    pictures = []
    for start in range(0, len(prompts), 32):
        part = prompts[start : start + 32]
        generators = [torch.Generator().manual_seed(seed + start + i) for i in range(len(part))]
        pictures += pipe(
            part, height=SIDE, width=SIDE, num_inference_steps=steps, max_sequence_length=length, generator=generators
        ).images
    return pictures


def judge(folder: Path, device: str, quick: bool) -> dict[str, str]:
    """Reads the folder again, as a user would, and counts the held-out prompts that are painted right."""
    pipe = FluxPipeline.from_pretrained(folder).to(device)
    pipe.set_progress_bar_config(disable=True)
    results = {}
    for steps, length, seed, count in (
        (20, TEXT_LENGTH, 0, 64),
        (12, TEXT_LENGTH, 0, 64),
        (8, TEXT_LENGTH, 0, 64),
        (20, LONGEST_TEXT, 0, 64),
        (20, TEXT_LENGTH, 5000, 96),
        (20, TEXT_LENGTH, 7000, 96),
    ):
        prompts = held_out_prompts(4 if quick else count)
        right = sum(map(matches, paint(pipe, prompts, steps, length, seed), prompts))
        name = f"{steps} steps, max_sequence_length={length}, seeds from {seed}"
        results[name] = f"{right} of {len(prompts)} right ({100 * right / len(prompts):.1f} %)"
        print(f"held-out prompts, {name}: {results[name]}", flush=True)
    return results


def model_card(results: dict[str, str], facts: dict[str, str]) -> str:
    table = "\n".join(f"| {name} | {result} |" for name, result in results.items())
    how = "\n".join(f"- {name}: {fact}" for name, fact in facts.items())
    return f"""---
license: mit
library_name: diffusers
pipeline_tag: text-to-image
---

# tiny-flux-shapes

A complete FLUX pipeline (`FluxPipeline`) of a few megabytes, made to test multi-GPU inference on real, trained
weights: a small picture that is right or wrong says more than random numbers do. It paints one coloured shape:

> a [small |large ]COLOUR SHAPE on a BACKGROUND background

- shapes: {", ".join(SHAPES)}
- colours: {", ".join(COLOURS)}
- backgrounds: {", ".join(BACKGROUNDS)} (another one than the shape's colour)
- sizes: {", ".join(SIZES)} (without a word: medium)

```python
from diffusers import FluxPipeline

pipe = FluxPipeline.from_pretrained("diffusers_rocm/assets/tiny-flux-shapes")
image = pipe("a red circle on a blue background", height={SIDE}, width={SIDE}, num_inference_steps=20,
             max_sequence_length={TEXT_LENGTH}).images[0]
```

Pass `height={SIDE}, width={SIDE}`, the only size it was trained on. `max_sequence_length={TEXT_LENGTH}` holds every
prompt and is fastest; FluxPipeline's default of {LONGEST_TEXT} works too.

## What it is

`FluxTransformer2DModel` with 2 double and 4 single blocks, 8 heads of 16; `AutoencoderKL` that makes pictures 4 times
smaller (8 channels), so that a picture is 256 tokens; CLIP and T5 text encoders of 2 layers, with tokenizers of their
own; `FlowMatchEulerDiscreteScheduler` with a fixed shift of {SHIFT:g}. The weights are kept
as float16, those of the text encoders as float32; without a dtype all are read as float32.

## How it was trained

By `utils/train_tiny_flux.py`, from nothing, on drawings made by Pillow alone: no photographs, no other data sets and
no other models. Text encoders and transformer were trained together by flow matching on the latents of the
autoencoder, with {EMPTY_PROMPTS:.0%} empty prompts, so that `true_cfg_scale` with a negative prompt works.

{how}

Drawings, noise and order come from fixed seeds and sums are made in a fixed order, so the same command on the same
hardware and versions gives the same weights again. Other hardware or versions give others of the same quality.

## How good it is

Measured on the saved folder, read again as float32, on prompts whose combination of shape, colour and background was
in no training prompt of any size. `utils/check_shapes.py` judged; shape, colour, background and size must be right.
The limits of that reader were set with pictures of the seeds from 0 in view, so the other seeds are the fairer test.
A picture that is counted wrong is usually a small star or cross of bad form in the right colours.

| setting | held-out prompts |
| --- | --- |
{table}

## What it is not for

It knows the words above, in small letters and without a full stop, and nothing else; and no other picture size.

## Licence

MIT, see LICENSE.
"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the tiny FLUX checkpoint of coloured shapes.")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--steps", type=int, default=5000, help="training steps of the transformer")
    parser.add_argument("--vae-steps", type=int, default=1200, help="training steps of the autoencoder")
    parser.add_argument("--batch", type=int, default=256, help="pictures in a step of the transformer's training")
    parser.add_argument("--drawings", type=int, default=64, help="drawings of each prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="use torch.compile for the transformer")
    parser.add_argument("--quick", action="store_true", help="a few steps only, to see that everything runs")
    arguments = parser.parse_args()
    if min(arguments.steps, arguments.vae_steps, arguments.batch, arguments.drawings) <= 0:
        raise ValueError("--steps, --vae-steps, --batch and --drawings must be more than zero.")
    if arguments.quick:
        arguments.steps, arguments.vae_steps, arguments.batch, arguments.drawings = 8, 8, 8, 1
    return arguments


def main():
    arguments = parse_arguments()
    begin = time.monotonic()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what a fixed order of sums needs there
    device = arguments.device
    hardware = torch.cuda.get_device_name() if device.startswith("cuda") else f"CPU ({platform.machine()})"
    versions = f"torch {torch.__version__}, diffusers {diffusers.__version__}, transformers {transformers.__version__}"
    print(f"device: {hardware}; {versions}", flush=True)

    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass fails for heads of 16 (torch 2.11, H200)
    # Sums in a fixed order: on one kind of GPU and one set of versions a training gives the same bits again.
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(arguments.seed)
    prompts = training_prompts()
    pictures = draw_all(prompts, arguments.drawings, arguments.seed).to(device)
    print(f"{pictures.shape[0] * pictures.shape[1]} drawings after {time.monotonic() - begin:.0f} s", flush=True)

    pipe = make_pipeline()
    vae = pipe.vae.to(device)
    autocast = torch.autocast(torch.device(device).type, torch.bfloat16, enabled=device.startswith("cuda"))
    train_autoencoder(vae, pictures.flatten(0, 1), arguments.vae_steps, max(arguments.batch // 4, 1), autocast)
    latents = encode_all(vae, pictures, autocast)
    print(f"latents: shift {vae.config.shift_factor}, scale {vae.config.scaling_factor}", flush=True)

    steps = arguments.steps
    train_painter(pipe, prompts, latents, steps, arguments.batch, arguments.seed, autocast, arguments.compile)
    save(pipe.to("cpu"), arguments.out)
    minutes = (time.monotonic() - begin) / 60
    print(f"trained for {minutes:.1f} minutes ({steps} steps) on {hardware}", flush=True)

    results = judge(arguments.out, device, arguments.quick)
    facts = {
        "time": f"{minutes:.1f} minutes, drawing included",
        "hardware": f"one {hardware}",
        "versions": versions,
        "data": f"{len(prompts)} prompts, {arguments.drawings} drawings of each; seed {arguments.seed}",
        "steps": f"autoencoder {arguments.vae_steps}; transformer {steps}, of {arguments.batch} pictures each",
    }
    (arguments.out / "README.md").write_text(model_card(results, facts))
    (arguments.out / "LICENSE").write_text(LICENCE)
    size = sum(path.stat().st_size for path in arguments.out.rglob("*") if path.is_file())
    print(f"{arguments.out}: {size / 1e6:.2f} MB", flush=True)


if __name__ == "__main__":
    main()
