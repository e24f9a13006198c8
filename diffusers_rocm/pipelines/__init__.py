"""Whole pipelines in parallel."""

from diffusers import DiffusionPipeline

from ..distributed.axis import Axis
from ..hooks.rank_guard import SynchronisedInputs, SynchronisedScheduler
from ..models._modeling_parallel import OurConfig


def parallelize(pipe: DiffusionPipeline, config: OurConfig) -> Axis:
    """Make the denoiser of a pipeline that is in memory parallel, in place, and keep its ranks equal.

    Every rank runs the pipeline, for the same number of steps, with as many prompts of the same padded length. The
    first rank's schedule, latents and embeddings count: all ranks arrive at its latents, whatever the words of their
    own prompts and their seeds. The scheduler is the one that the pipeline has now. A ControlNet is a model of its own
    and stays whole: call its `enable_parallelism` to make it parallel.

    Returns:
        The axis of the ranks that share the denoiser.

    Raises:
        ValueError: a pipeline whose denoiser is a UNet, or has no plan. Nothing is parallel then.
    """
    components = (getattr(pipe, name, None) for name in ("transformer", "transformer_2"))
    denoisers = [component for component in components if component is not None]
    if not denoisers:
        kind = "a UNet" if getattr(pipe, "unet", None) is not None else "no transformer"
        raise ValueError(f"{type(pipe).__name__} has {kind}; only diffusion transformers can be parallel")
    enabled = []
    try:
        for denoiser in denoisers:
            denoiser.enable_parallelism(config=config)
            enabled.append(denoiser)
    except ValueError:
        for denoiser in enabled:
            denoiser.disable_parallelism()
        raise
    first = denoisers[0].parallelism
    if first.axis.size > 1:
        inputs = [SynchronisedInputs(denoiser, first.axis) for denoiser in denoisers]
        for denoiser, each in zip(denoisers, inputs, strict=True):
            denoiser.parallelism.hooks.append(each)
        first.hooks.append(SynchronisedScheduler(pipe.scheduler, first.axis, inputs))
    return first.axis
