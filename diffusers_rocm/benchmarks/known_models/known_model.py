"""What a transformer of diffusers is, to benchmarks: of its real size, without its weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Size:
    """Of what is made: pixels, frames of a video, tokens of its text."""

    height: int
    width: int
    frames: int = 1
    text: int = 512


Randn = Callable[..., Tensor]


def mask_of(words: int, text: int, device: torch.device) -> Tensor:
    """Of a text, padded at its end."""
    return (torch.arange(text, device=device) < words)[None]


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
        text: the argument that is the text, [..., tokens, channels], or a list of such; None if there is none.
    """

    cls: str
    size: Size
    inputs: Callable[[Randn, Size, Mapping[str, Any]], dict[str, Any]]
    config: dict[str, Any] = field(default_factory=dict)
    multiple: int = 16
    frames_apart: int = 4
    text: str | None = "encoder_hidden_states"

    def sized(self, resolution: int | None, frames: int | None, text: int | None) -> Size:
        """Another size of the same shape; the resolution is the height.

        Raises:
            ValueError: no whole number of tokens, or of latents of frames; frames of what makes pictures.
        """
        if frames is not None and frames > 1 and self.size.frames == 1:
            raise ValueError(f"{frames} frames: a {self.cls} makes pictures")
        if resolution is not None and resolution % self.multiple:
            raise ValueError(f"a height of {resolution} is no multiple of {self.multiple}, the pixels to a token")
        if frames not in (None, self.size.frames) and (over := (frames - 1) % self.frames_apart):
            fewer = frames - over
            raise ValueError(f"{frames} frames: a {self.cls} makes {fewer} or {fewer + self.frames_apart}")
        size = self.size
        if resolution is not None:
            across = round(resolution * size.width / size.height / self.multiple)
            size = replace(size, height=resolution, width=max(across, 1) * self.multiple)
        return replace(size, frames=frames or size.frames, text=text or size.text)
