"""Whole pipelines in parallel."""

import torch
from diffusers import DiffusionPipeline
from torch import nn

from ..distributed.agreement import agree
from ..distributed.mesh import Axes
from ..hooks.cfg_parallel import GuidanceParallel
from ..hooks.rank_guard import GuardedScheduler, InputGuard
from ..hooks.step_graph import StepGraph
from ..models._modeling_parallel import OurConfig
from ..models.modeling_utils import Removable
from .choices import check_choices
from .denoisers import denoisers_of
from .parallel_call import ParallelCall
from .vae import check_vae, share_vae


def parallelize(
    pipe: DiffusionPipeline,
    config: OurConfig,
    rank_check: str = "first",
    vae: str = "replicate",
    graph: bool = False,
) -> Axes:
    """Make the denoisers of a pipeline that is in memory parallel, in place, and keep its ranks equal.

    Every rank makes the same calls, with the same arguments, and gets all pictures. Without a generator the ranks draw
    one seed together. Pipelines made of this one's components from here on (`from_pipe`) are parallel too, and the
    scheduler may be replaced. A ControlNet is a model of its own and stays whole: call its `enable_parallelism` to
    make it parallel. `pipe.transformer.disable_parallelism()` undoes it all, for the first denoiser; call it for each.

    Args:
        config: any of this package. A denoiser may be parallel already, under one alike.
        rank_check: when to compare the inputs of the ranks: in the `"first"` step of a call, `"always"`, or `"off"`.
        vae: how the ranks that share a picture decode it: `"replicate"`, each all of it; `"first-rank"`, the first one
            for all; `"tile"`, each some of the tiles, of which the picture is made by the VAE's own tiled decoding.
        graph: replay each denoiser's forward as a CUDA (HIP) graph, from the third on: `hooks.step_graph`.

    Returns:
        The axes of the mesh.

    Raises:
        ValueError: a pipeline whose denoiser is a UNet, or has no plan, or whose VAE cannot be had so; ranks with
            different models, configs or other arguments; graphs without such a GPU. Nothing is parallel then.
    """
    if graph and not torch.cuda.is_available():
        raise ValueError("graph=True needs a GPU of CUDA or ROCm, and torch sees none")
    if hasattr(pipe, "parallel_call"):
        raise ValueError(f"this {type(pipe).__name__} is parallel already; one with its components is so by itself")
    check_choices(rank_check=rank_check, vae=vae)
    check_vae(pipe, vae)
    denoisers = denoisers_of(pipe)
    if not denoisers:
        kind = "a UNet" if getattr(pipe, "unet", None) is not None else "no transformer"
        raise ValueError(f"{type(pipe).__name__} has {kind}; only diffusion transformers can be parallel")
    enabled = []
    try:
        for denoiser in denoisers:
            if not _is_parallel_so(denoiser, config):
                denoiser.enable_parallelism(config=config)
                enabled.append(denoiser)
        axes = denoisers[0].parallelism.axes
        agree("arguments of parallelize()", {"rank_check": rank_check, "vae": vae, "graph": graph}, axes.world)
    except ValueError:
        for denoiser in enabled:
            denoiser.disable_parallelism()
        raise
    if vae != "replicate":
        denoisers[0].parallelism.hooks.append(share_vae(pipe.vae, vae, axes.replica))
    if graph:
        for denoiser in denoisers:
            StepGraph(denoiser)
    if axes.world.size == 1:
        return axes
    for denoiser, hook in guard_ranks(pipe, denoisers, rank_check):
        denoiser.parallelism.hooks.append(hook)
    return axes


def _is_parallel_so(denoiser: nn.Module, config: OurConfig) -> bool:
    """Was it loaded, or enabled, under a config alike, and is of no pipeline yet?"""
    own = getattr(denoiser, "parallelism", None)
    if own is None or any(isinstance(hook, (InputGuard, ParallelCall)) for hook in own.hooks):
        return False
    return own.axes == config.axes() and own.config.rotate_method == config.rotate_method


def guard_ranks(
    pipe: DiffusionPipeline, denoisers: list[nn.Module], rank_check: str
) -> list[tuple[nn.Module, Removable]]:
    """Hang on a pipeline what keeps its ranks equal; each hook with the denoiser that it belongs to."""
    axes, hooks = denoisers[0].parallelism.axes, []
    listeners = [hook for each in denoisers for hook in each.parallelism.hooks if isinstance(hook, GuidanceParallel)]
    for guidance in listeners:
        guidance.check = rank_check != "off"
        guidance.take_turns_with(listeners[0])
    if rank_check != "off" and axes.replica.size > 1:
        guards = [InputGuard(denoiser, axes.replica, always=rank_check == "always") for denoiser in denoisers]
        hooks += zip(denoisers, guards, strict=True)
        listeners += guards
    scheduler = GuardedScheduler(pipe.scheduler, axes.replica, listeners, rank_check != "off")
    hooks += [(denoisers[0], scheduler), (denoisers[0], ParallelCall(pipe, axes, scheduler))]
    return hooks
