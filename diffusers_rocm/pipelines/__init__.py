"""Whole pipelines in parallel."""

from diffusers import DiffusionPipeline

from ..distributed.axis import Axis
from ..hooks.rank_guard import synchronise_inputs
from ..models._modeling_parallel import TensorParallelConfig


def parallelize(pipe: DiffusionPipeline, config: TensorParallelConfig) -> Axis:
    """Make the denoiser of a pipeline that is in memory parallel, in place, and keep its ranks' inputs equal.

    Every rank runs the pipeline; all of them arrive at the latents of the axis' first rank. A ControlNet is
    a model of its own and stays whole: call its `enable_parallelism` to shard it too.

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
        if denoiser.parallelism.axis.size > 1:
            denoiser.parallelism.hooks.append(synchronise_inputs(denoiser, denoiser.parallelism.axis))
    return denoisers[0].parallelism.axis
