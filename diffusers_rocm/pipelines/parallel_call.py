"""What happens around a pipeline's call: ranks that share a picture draw the same numbers, and none is idle."""

import copy
import functools
import inspect
import re
import weakref
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import nn

from ..distributed import name_ranks
from ..distributed.agreement import agree, fail_together
from ..distributed.axis import Axis
from ..distributed.collectives import all_gather_int64
from ..distributed.mesh import Axes
from ..hooks.rank_guard import GuardedScheduler
from ..hooks.stand_in import stands_in_for
from ..loaders.lora import check_adapter_is_for_whole
from ..models.modeling_utils import check_can_be_saved
from .data_parallel import spread


class ParallelCall:
    """Hangs on pipelines with the same denoiser, around their calls, until `remove()`."""

    def __init__(self, pipe: DiffusionPipeline, axes: Axes, guard: GuardedScheduler):
        self.axes, self._guard, self._check, self._calls = axes, guard, guard.check, 0
        self._pipes: weakref.WeakSet[DiffusionPipeline] = weakref.WeakSet()
        self.hang_on(pipe)

    def hang_on(self, pipe: DiffusionPipeline) -> None:
        """Be around the calls of this pipeline too."""
        if pipe not in self._pipes:
            self._pipes.add(pipe)
            pipe.parallel_call = self
            pipe.__class__ = _parallel_class(type(pipe))

    def remove(self) -> None:
        for pipe in self._pipes:
            pipe.__class__ = type(pipe).__base__
            del pipe.parallel_call

    def run(
        self,
        pipe: DiffusionPipeline,
        call: Callable[..., Any],
        known: Mapping[str, inspect.Parameter],
        arguments: dict[str, Any],
    ) -> Any:
        """`call(**arguments)` for all ranks."""
        self._guard.follow(pipe.scheduler)

        def guarded(**arguments: Any) -> Any:
            try:
                with self._guard.run():
                    return call(**arguments)
            except RuntimeError as error:
                if re.search("timed? ?out", str(error), re.IGNORECASE) is None:
                    raise
                raise RuntimeError(
                    f"{name_ranks(self.axes.world.ranks())} make pictures together, and one of them did not answer "
                    f"in time: it has stopped, or is at another call ({error})"
                ) from error

        if "generator" in known:
            self._calls += 1
            given = arguments.get("generator")
            arguments["generator"] = _generators(given, self._calls, self.axes.world, self._check)
        if self.axes.cfg.size > 1:
            defaults = {name: each.default for name, each in known.items()}
            reason = _no_guidance(pipe, defaults | arguments)
            if reason is not None:
                raise ValueError(
                    f"{type(pipe).__name__} runs no guidance ({reason}), so cfg={self.axes.cfg.size} would "
                    "have all groups do the same work; turn guidance on, or use dp, ulysses or tp in its place"
                )
        if hasattr(getattr(pipe, "vae", None), "parallel_decode"):
            # A rank that wants latents would not decode, and the others would wait for it.
            agree("arguments", {"output_type": arguments.get("output_type")}, self.axes.replica)
        if self.axes.dp.size > 1:
            return spread(guarded, pipe, arguments, self.axes.dp)
        return guarded(**arguments)


@functools.cache
def _parallel_class(cls: type[DiffusionPipeline]) -> type[DiffusionPipeline]:
    signature = inspect.signature(cls.__call__)

    @stands_in_for(cls)
    class Parallel(cls):
        @functools.wraps(cls.__call__)  # others look at the signature
        def __call__(self, *args, **kwargs):
            arguments = dict(signature.bind(self, *args, **kwargs).arguments)
            del arguments["self"]
            for name in [name for name, each in signature.parameters.items() if each.kind == each.VAR_KEYWORD]:
                arguments |= arguments.pop(name, {})
            return self.parallel_call.run(self, super().__call__, signature.parameters, arguments)

        @functools.wraps(cls.enable_model_cpu_offload)
        def enable_model_cpu_offload(self, gpu_id=None, device=None):
            return super().enable_model_cpu_offload(*_own_device(gpu_id, device))

        @functools.wraps(cls.enable_sequential_cpu_offload)
        def enable_sequential_cpu_offload(self, gpu_id=None, device=None):
            return super().enable_sequential_cpu_offload(*_own_device(gpu_id, device))

        @functools.wraps(cls.save_pretrained)
        def save_pretrained(self, save_directory, *args, **kwargs):
            for component in self.components.values():  # before any of them is written
                if hasattr(component, "shared_by_ranks"):
                    component.save_pretrained(save_directory)  # is refused
                if getattr(component, "parallelism", None) is not None:
                    check_can_be_saved(component)
            return super().save_pretrained(save_directory, *args, **kwargs)

    if hasattr(cls, "lora_state_dict"):
        Parallel.lora_state_dict = _lora_state_dict(cls)
    return Parallel


def _lora_state_dict(cls: type[DiffusionPipeline]) -> Callable:
    """By it `load_lora_weights` reads an adapter, before it changes a model."""

    @functools.wraps(cls.lora_state_dict)
    def lora_state_dict(self, *args, **kwargs):
        with fail_together("read an adapter", self.parallel_call.axes.world):
            found = cls.lora_state_dict(*args, **kwargs)
            for name, component in self.components.items():
                check_adapter_is_for_whole(component, name, found[0] if isinstance(found, tuple) else found)
            return found

    return lora_state_dict


def _own_device(gpu_id: int | None, device: torch.device | str | None) -> tuple[int | None, torch.device | str | None]:
    """What diffusers is to offload to: this rank's accelerator, where it would take the first."""
    if gpu_id is None and device is None and torch.accelerator.is_available():
        device = torch.device(torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index())
    return gpu_id, device


def wrap_register_modules(original: Callable) -> Callable:
    """A pipeline that is made of the components of a parallel one (`from_pipe`) is parallel too."""

    @functools.wraps(original)
    def register_modules(self, **kwargs):
        original(self, **kwargs)
        for component in kwargs.values():
            parallelism = vars(component).get("parallelism") if isinstance(component, nn.Module) else None
            for hook in parallelism.hooks if parallelism is not None else ():
                if isinstance(hook, ParallelCall):
                    hook.hang_on(self)

    return register_modules


def _generators(given: Any, calls: int, axis: Axis, check: bool) -> Any:
    """The caller's generators; a new one, the same on all ranks, if there are none.

    Args:
        calls: that this rank has made of the pipelines that share a denoiser.

    Raises:
        ValueError: ranks at different calls; to be checked, and some ranks have other generators, or seeds, or none.
    """
    generators = given if isinstance(given, list) else [] if given is None else [given]
    states = zlib.crc32(b"".join(each.get_state().numpy().tobytes() for each in generators))
    seed = generators[0].initial_seed() if generators else torch.randint(2**62, ()).item()
    # Numbers of 64 bits: a seed may have no sign.
    row = [len(generators), states, seed - (seed >= 2**63) * 2**64, calls]
    rows, ranks = all_gather_int64(torch.tensor(row), axis), axis.ranks()
    if len(set(rows[:, 3].tolist())) > 1:
        seen = ", ".join(f"{call} on rank {rank}" for call, rank in zip(rows[:, 3].tolist(), ranks, strict=True))
        raise ValueError(f"the ranks are at different calls ({seen}): some have left one by an error, start them anew")
    if check and len({(count, state) for count, state, *_ in rows.tolist()}) > 1:
        seen = [f"seed {seed}" if count else "none" for count, _, seed, _ in rows.tolist()]
        seen = ", ".join(f"{each} on rank {rank}" for each, rank in zip(seen, ranks, strict=True))
        raise ValueError(f"the ranks were given different generators ({seen}); give all the same, or none")
    if generators:
        return given
    return torch.Generator().manual_seed(rows[0, 2].item())


def _no_guidance(pipe: DiffusionPipeline, arguments: Mapping[str, Any]) -> str | None:
    """Why this call runs no classifier-free guidance; None where it does, or where only its steps will tell."""
    guider = getattr(pipe, "guider", None)
    if hasattr(guider, "num_conditions"):
        anew = copy.copy(guider)
        anew._num_inference_steps = None  # an earlier run may have ended without guidance
        return f"its {type(guider).__name__} asks for one prediction a step" if anew.num_conditions == 1 else None
    if "true_cfg_scale" in arguments:
        scale = arguments["true_cfg_scale"]
        if scale <= 1:
            return f"true_cfg_scale={scale}"
        negative = [arguments.get(name) for name in ("negative_prompt", "negative_prompt_embeds")]
        return "it has no negative_prompt" if all(each is None for each in negative) else None
    if isinstance(getattr(type(pipe), "do_classifier_free_guidance", None), property):
        # The pipeline's own rule, which reads what its call is about to set.
        before = vars(pipe).get("_guidance_scale")
        pipe._guidance_scale = arguments.get("guidance_scale")
        try:
            return None if pipe.do_classifier_free_guidance else f"guidance_scale={pipe._guidance_scale}"
        except (AttributeError, TypeError):
            return None
        finally:
            pipe._guidance_scale = before
    if guider is None and not any(name.startswith("negative") for name in arguments):
        if getattr(pipe.transformer.config, "guidance_embeds", False):
            return "its guidance goes into the transformer"
        if not any("guidance" in name for name in arguments):
            return "it takes no guidance"
    return None
