"""Models whose weights are read when they work, and given up when the next one does."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.utils import send_to_device
from torch import Tensor, nn

from ..distributed.axis import Axis
from ..distributed.collectives import on_all_ranks
from .stand_in import stands_in_for


class Turn:
    """Which of several models, one working after the other, has its weights."""

    holder: "DiskOffload | None" = None


class DiskOffload(ModelHook):
    """Hangs on a model with all its weights, which it gives up until its forward, or a VAE's `encode` or `decode`.

    Buffers, which are small, stay: pipelines read them themselves. What changes the weights would be lost when they
    are read again, and is an error then; not seen is what goes past autograd, as writing to a parameter's `data` does.

    Attributes:
        turn: of the models that give up their weights for this one, and it for them. Without one it keeps them from
            its first forward on.

    Args:
        read: makes the model anew, with its weights.
        device: where the weights are wanted; it is the model's `device` from here on.
        together: ranks that call the model, and read it, together: where one has to, as it has decoded, all do.

    Raises:
        ValueError: the model has other parameters than it was read with, or changed ones; a state dict while there
            are no weights.
    """

    turn: Turn | None = None

    def __init__(
        self, model: nn.Module, read: Callable[[], nn.Module], device: torch.device, together: Axis | None = None
    ):
        self.execution_device = device  # which pipelines ask for
        self._model, self._read, self._together = model, read, together
        self._put: dict[int, tuple[nn.Parameter, int, torch.dtype]] | None = None  # by us; before that, it is whole
        self._here = True
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        model.__class__ = _on_disk_class(type(model))
        add_hook_to_module(model, self)
        model.register_state_dict_pre_hook(self._check_here)

    @property
    def gives_up(self) -> bool:
        """Has it begun to?"""
        return self._put is not None

    @torch.compiler.disable
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict]:
        if not (self._here if self._together is None else on_all_ranks(self._here, self._together)):
            self._fetch()
        return send_to_device((args, kwargs), self.execution_device)

    def _fetch(self) -> None:
        if self.turn is not None:
            if self.turn.holder is not None:
                self.turn.holder.give_up()
            self.turn.holder = self
        self._check_unchanged()
        anew = self._read()
        read = dict(anew.named_parameters())
        for module in anew.modules():  # which may live on in a cycle of references
            module._parameters.clear()
        self._replace(lambda path, _: read.pop(path).to(self.execution_device))
        self._here = True

    def give_up(self) -> None:
        """Let the weights go. Raises ValueError where they are not those that were read."""
        self._check_unchanged()
        self._replace(lambda path, x: torch.empty(x.shape, dtype=x.dtype, device="meta"))
        self._here = False

    def _replace(self, tensor_for: Callable[[str, nn.Parameter], Tensor]) -> None:
        """Each parameter by another; one that has two places keeps both."""
        replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        for path, module in self._model.named_modules():
            for name, old in module._parameters.items():
                if old is None:
                    continue
                if id(old) not in replaced:
                    tensor = tensor_for(f"{path}.{name}" if path else name, old)
                    replaced[id(old)] = old, nn.Parameter(tensor, requires_grad=old.requires_grad)
                module._parameters[name] = replaced[id(old)][1]
        self._put = {id(new): (new, _version(new), new.dtype) for _, new in replaced.values()}

    def _check_unchanged(self) -> None:
        for path, x in self._model.named_parameters() if self.gives_up else ():
            if self._put.get(id(x), ())[1:] != (_version(x), x.dtype):
                raise ValueError(
                    f"{path} of this {type(self._model).__name__} is not what was read, and would be read again: "
                    "offload='model' keeps what is added to a model, or changed, and 'disk' does not"
                )

    def _check_here(self, *_: Any) -> None:
        if not self._here:
            raise ValueError(f"the weights of this {type(self._model).__name__} are on disk, from where it was read")


def _version(x: Tensor) -> int:
    """How often it was changed in place."""
    return 0 if x.is_inference() else x._version


@functools.cache
def _on_disk_class(cls: type[nn.Module]) -> type[nn.Module]:
    @stands_in_for(cls)
    class OnDisk(cls):
        @property
        def device(self) -> torch.device:
            """Where it works: its weights may be nowhere, and pipelines send there what they feed it."""
            return self._hf_hook.execution_device if hasattr(self, "_hf_hook") else super().device

    return OnDisk


def is_on_disk(model: nn.Module) -> bool:
    """Are its weights read anew for each use?"""
    hook = getattr(model, "_hf_hook", None)
    return isinstance(hook, DiskOffload) and hook.gives_up
