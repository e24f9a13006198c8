"""Whole pipelines in parallel."""

from diffusers import DiffusionPipeline

from ..distributed.axis import Axis
from ..hooks.rank_guard import SynchronisedScheduler, synchronise_inputs
from ..models._modeling_parallel import TensorParallelConfig


def parallelize(pipe: DiffusionPipeline, config: TensorParallelConfig) -> Axis:
    """Make the denoiser of a pipeline that is in memory parallel, in place, and keep its ranks equal.

    Every rank runs the pipeline, for the same number of steps. The first rank's schedule, latents and embeddings
    count: all ranks arrive at its latents, whatever their own seeds and prompts. The scheduler is the one that the
    pipeline has now. A ControlNet is a model of its own and stays whole: call its `enable_parallelism` to shard it.

    Returns:
        The axis that the denoiser is sharded over.

    Raises:
        ValueError: a pipeline whose denoiser is a UNet, or has no plan.
    """
    components = (getattr(pipe, name, None) for name in ("transformer", "transformer_2"))
    denoisers = [component for component in components if component is not None]
    if not denoisers:
        kind = "a UNet" if getattr(pipe, "unet", None) is not None else "no transformer"
        raise ValueError(f"{type(pipe).__name__} has {kind}; only diffusion transformers can be parallel")
    for denoiser in denoisers:
        denoiser.enable_parallelism(config=config)
    first = denoisers[0].parallelism
    if first.axis.size > 1:
        for denoiser in denoisers:
            denoiser.parallelism.hooks.append(synchronise_inputs(denoiser, first.axis))
        first.hooks.append(SynchronisedScheduler(pipe.scheduler, first.axis))
    return first.axis
