"""Spreads the pictures of one call over replicas of the pipeline, and gives every rank all of them, in order.

Each replica makes as many as any other, so that none waits long: what is over is made twice, and dropped.
"""

import contextlib
import functools
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from diffusers.utils import BaseOutput
from diffusers.utils.torch_utils import randn_tensor
from PIL import Image
from torch import Tensor

from ..distributed.agreement import agree, leaves
from ..distributed.axis import Axis
from ..distributed.collectives import all_gather_stacked, broadcast_from_first
from ..distributed.sharding import Block


_PER_PROMPT = ("num_images_per_prompt", "num_videos_per_prompt")


def spread(call: Callable[..., Any], pipe: DiffusionPipeline, arguments: Mapping[str, Any], dp: Axis) -> Any:
    """`call(**arguments)`, its pictures shared by the ranks of `dp`.

    Args:
        arguments: equal on all ranks, but for callbacks. One generator, or one for each picture; they are afterwards
            where one process would have left them.

    Returns:
        What one process would have: all pictures, in the order of the prompts.

    Raises:
        ValueError: an argument that fits neither prompts nor pictures, or an output that cannot be gathered; ranks
            with different arguments.
    """
    given = {name: value for name, value in arguments.items() if not name.startswith("callback")}
    named = ((name, _as_tensor(value)) for name, value in leaves(given))
    plain = {name: value for name, value in named if isinstance(value, (Tensor, str, int, float))}
    schedule = {f"scheduler.{key}": x for key, x in pipe.scheduler.config.items() if not key.startswith("_")}
    agree("arguments", plain | schedule, dp)
    prompts = _count_prompts(arguments)
    per_prompt = next((arguments[name] for name in _PER_PROMPT if arguments.get(name)), 1)
    total = prompts * per_prompt
    if total == 0:
        raise ValueError(f"{type(pipe).__name__} is given no prompts")
    shares = [range(*Block(total, 1).bounds(rank, dp.size)) for rank in range(dp.size)]
    count = math.ceil(total / dp.size)
    wanted = [[*share, *[(share or range(total))[-1]] * (count - len(share))] for share in shares]
    mine = wanted[dp.rank]

    local, generator = dict(arguments), arguments.get("generator")
    # From some of which pipelines draw, by one generator or another.
    pictures = [name for name, value in given.items() if re.search("image|video", name) and _count(value)]
    pictures = [name for name in pictures if not name.startswith(("ip_adapter", "negative_ip_adapter"))]
    for name, value in arguments.items():
        if name == "latents" and value is not None:
            local[name] = value[mine]
        elif name == "generator" and isinstance(value, list):
            if len(value) != total or len({id(each) for each in value}) != total:
                raise ValueError(f"{len(value)} generators for {total} pictures; give one, or one of its own for each")
            if pictures and len({each.get_state().numpy().tobytes() for each in value}) > 1:
                raise ValueError(
                    f"with {pictures[0]} and dp={dp.size}, give one generator for all pictures; got {total}"
                )
            seen = set()
            local[name] = [_copy(value[i]) if i in seen or seen.add(i) else value[i] for i in mine]
        elif name in _PER_PROMPT:
            local[name] = count if prompts == 1 else 1
        elif prompts > 1 and _count(value) == prompts:
            if "prompt" in name:
                places = [i // per_prompt for i in mine]
                local[name] = [value[i] for i in places] if isinstance(value, (list, tuple)) else value[places]
            elif name in pictures:
                raise ValueError(
                    f"{prompts} of {name} and {prompts} prompts: with dp={dp.size} nothing says whether each prompt "
                    "has one of its own; give one for all, or make a call for each"
                )
    shared = generator if isinstance(generator, torch.Generator) else None
    with _draw_for_all(pipe, shared, total, mine):
        output = call(**local)
    _settle(generator, shares, dp)

    places = [rank * count + index for rank, share in enumerate(shares) for index in range(len(share))]
    if isinstance(output, BaseOutput):
        for name in list(output):
            output[name] = _gather(output[name], name, count, places, dp)
        return output
    return tuple(_gather(value, f"output {index}", count, places, dp) for index, value in enumerate(output))


def _as_tensor(value: Any) -> Any:
    """A picture's pixels; anything else as it is."""
    return torch.from_numpy(np.array(value)) if isinstance(value, (Image.Image, np.ndarray)) else value


def _count(value: Any) -> int:
    """How many of something are given; none of a number, a name or None."""
    if isinstance(value, Image.Image):
        return 1
    if isinstance(value, (Tensor, np.ndarray)):
        return value.shape[0] if value.ndim else 0
    return len(value) if isinstance(value, (list, tuple)) else 0


def _count_prompts(arguments: Mapping[str, Any]) -> int:
    for name in ("prompt", "prompt_embeds"):
        value = arguments.get(name)
        if isinstance(value, (list, tuple)):
            return len(value)
        if isinstance(value, Tensor):
            return value.shape[0]
    return 1


def _copy(generator: torch.Generator) -> torch.Generator:
    copied = torch.Generator(generator.device)
    copied.set_state(generator.get_state())
    return copied


@contextlib.contextmanager
def _draw_for_all(
    pipe: DiffusionPipeline, generator: torch.Generator | None, total: int, mine: list[int]
) -> Iterator[None]:
    """One generator serves all pictures: each replica draws for all of them, and takes its own.

    Pipelines and schedulers draw by `torch.randn`, or by diffusers' `randn_tensor`, which calls it. What a VAE draws
    is for the picture to begin with, which is one for all.

    Raises:
        ValueError: something else drew from it, and no replica knows what the others would have.
    """
    if generator is None:
        yield
        return
    original, known = torch.randn, generator.get_state()
    classes = [cls for each in (pipe, pipe.scheduler) for cls in type(each).__mro__]
    modules = {cls.__module__ for cls in classes}

    def check() -> None:
        if not torch.equal(generator.get_state(), known):
            raise ValueError(
                f"{type(pipe).__name__} draws from its generator by other means than torch.randn, which dp cannot "
                "share; give one generator for each picture"
            )

    @functools.wraps(original)
    def randn(*size, **kwargs):
        nonlocal known
        if kwargs.get("generator") is not generator:
            return original(*size, **kwargs)
        check()
        shape = kwargs.pop("size", size[0] if size and not isinstance(size[0], int) else size)
        caller = sys._getframe(1)
        if caller.f_code is randn_tensor.__code__:
            caller = caller.f_back
        shared = caller.f_globals["__name__"] in modules and len(shape) > 0 and shape[0] == len(mine)
        drawn = original((total, *shape[1:]) if shared else shape, **kwargs)
        known = generator.get_state()
        return drawn[mine] if shared else drawn

    torch.randn = randn
    try:
        yield
        check()
    finally:
        torch.randn = original


def _settle(generator: Any, shares: list[range], dp: Axis) -> None:
    """Every rank's generators go on from where they would be in one process."""
    if isinstance(generator, torch.Generator):
        generator.set_state(broadcast_from_first(generator.get_state(), dp))
    for index, each in enumerate(generator if isinstance(generator, list) else []):
        owner = next(rank for rank, share in enumerate(shares) if index in share)
        # A copy: torch reads a state from the start of its storage.
        each.set_state(all_gather_stacked(each.get_state().to(dp.device), dp)[owner].cpu().clone())


def _gather(value: Any, name: str, count: int, places: list[int], dp: Axis) -> Any:
    if value is None:
        return None
    if isinstance(value, Tensor) and value.shape[:1] == (count,):
        return all_gather_stacked(value.to(dp.device), dp).flatten(0, 1)[places].to(value.device)
    if isinstance(value, np.ndarray) and value.shape[:1] == (count,):
        return _gather(torch.from_numpy(value), name, count, places, dp).numpy()
    if isinstance(value, list) and len(value) == count:
        first = value[0]
        if isinstance(first, Image.Image):
            pixels = torch.from_numpy(np.stack([np.asarray(image) for image in value]))
            return [Image.fromarray(x, first.mode) for x in _gather(pixels, name, count, places, dp).numpy()]
        if isinstance(first, list) and all(isinstance(frame, Image.Image) for frame in first):
            clips = torch.from_numpy(np.stack([np.stack([np.asarray(frame) for frame in clip]) for clip in value]))
            gathered = _gather(clips, name, count, places, dp).numpy()
            return [[Image.fromarray(frame, first[0].mode) for frame in clip] for clip in gathered]
        if isinstance(first, Tensor):
            return list(_gather(torch.stack(value), name, count, places, dp))
        if isinstance(first, bool):
            return _gather(torch.tensor(value), name, count, places, dp).tolist()
    kind = f"{type(value).__name__} of {len(value)}" if hasattr(value, "__len__") else type(value).__name__
    raise ValueError(f"{name} is a {kind}, not {count} pictures; output_type is 'pil', 'np', 'pt' or 'latent'")
