"""What the tiny FLUX checkpoint is trained on: drawings of the prompts, and tokenizers that read the prompts."""

import json
import multiprocessing
import os
import random

import numpy as np
import tokenizers
import torch
from check_shapes import BACKGROUNDS, COLOURS, SHAPES, SIZES, draw_picture, parse_prompt
from torch import Tensor
from transformers import CLIPTokenizer, T5TokenizerFast


def draw_prompt(prompt: str, count: int, seed: int) -> np.ndarray:
    rng = random.Random(f"{seed}/{prompt}")
    return np.stack([np.asarray(draw_picture(parse_prompt(prompt), rng)) for _ in range(count)])


def draw_all(prompts: list[str], count: int, seed: int) -> Tensor:
    """`count` drawings of each prompt: a byte tensor of (prompts, count, 3, side, side)."""
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        drawings = pool.starmap(draw_prompt, [(prompt, count, seed) for prompt in prompts], chunksize=4)
    return torch.from_numpy(np.stack(drawings)).permute(0, 1, 4, 2, 3).contiguous()


def prompt_words() -> list[str]:
    return sorted({*SHAPES, *COLOURS, *BACKGROUNDS, *SIZES, "a", "on", "background"})


def make_clip_tokenizer() -> CLIPTokenizer:
    """Each word of the prompts is one token; any other text falls apart into bytes."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE(end_of_word_suffix="</w>"))
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=4096, min_frequency=1, end_of_word_suffix="</w>", show_progress=False
    )
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.train_from_iterator(prompt_words(), trainer)
    merges = [tuple(merge) for merge in json.loads(model.to_str())["model"]["merges"]]
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, *(letter + "</w>" for letter in letters), *("".join(merge) for merge in merges)]
    tokens = [*dict.fromkeys(tokens), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=merges, model_max_length=77)


def make_t5_tokenizer() -> T5TokenizerFast:
    """Each word of the prompts is one token; any other text falls apart into characters."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,;:!?'-"
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((f"▁{word}", -1.0) for word in prompt_words())]
    pieces += [("▁", -4.0), *((letter, -4.0) for letter in letters)]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=512)
