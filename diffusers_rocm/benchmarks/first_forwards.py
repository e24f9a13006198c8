"""What a pipeline's denoiser says first, by a mesh and by one rank, and how near these are."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..pipelines.denoisers import denoisers_of
from ..pipelines.generation import GenerationRequest
from .distance import bar_of, distance
from .known_models import count_blocks


# Where guidance is one forward after the other, both are there to compare with.
KEPT = 2


@dataclass
class FirstForwards:
    """By one mesh.

    Attributes:
        blocks: of the denoiser.
        predictions: of the first two forwards. Where guidance is spread, a rank has one of them, or its half of one.
    """

    blocks: int = 0
    predictions: list[Tensor] = field(default_factory=list)

    def watch(self, pipe: DiffusionPipeline) -> None:
        """Keep what its denoisers say from here on."""
        denoisers = denoisers_of(pipe)
        self.blocks = count_blocks(denoisers[0])
        for denoiser in denoisers:
            denoiser.register_forward_hook(self.hear)

    def hear(self, denoiser: nn.Module, args: tuple, output: Any) -> None:
        if len(self.predictions) < KEPT:
            first = next(x for x in tree_leaves(output) if isinstance(x, Tensor))
            self.predictions.append(first.cpu().float())

    def distance_from(self, wanted: "FirstForwards") -> float:
        """Of the first one, from the nearest of the others', relative L2."""
        return min(nearest(self.predictions[0], each) for each in wanted.predictions)


def nearest(x: Tensor, wanted: Tensor) -> float:
    """Relative L2; from the nearest part of what has more items."""
    parts = wanted.split(len(x)) if len(x) < len(wanted) else (wanted,)
    alike = [each for each in parts if each.shape == x.shape]
    return min((distance(x, each) for each in alike), default=math.inf)


def bar_for(request: GenerationRequest, made: FirstForwards, device: torch.device) -> float:
    """How far the first forward may be from that of one rank."""
    return bar_of(made.blocks, request.dtype_on(device), request.is_lossy)
