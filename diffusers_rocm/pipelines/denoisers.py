"""Which of a pipeline's components are denoisers."""

from diffusers import DiffusionPipeline
from torch import nn


# Wan 2.2 has one for the noisy steps and one for the others, Ideogram 4 one for each branch of guidance.
DENOISERS = ("transformer", "transformer_2", "unconditional_transformer")


def denoisers_of(pipe: DiffusionPipeline) -> list[nn.Module]:
    """Its transformers, of which there is at least one unless it has a UNet."""
    return [model for name in DENOISERS if (model := getattr(pipe, name, None)) is not None]
