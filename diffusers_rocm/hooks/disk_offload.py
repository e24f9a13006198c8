"""Models whose weights are read when they work, and given up when the next one does."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.utils import send_to_device
from torch import nn


class Turn:
    """Which of several models, one working after the other, has its weights."""

    holder: "DiskOffload | None" = None


class DiskOffload(ModelHook):
    """Hangs on a model with all its weights, which it gives up until its forward, or a VAE's `encode` or `decode`.

    Buffers, which are small, stay: pipelines read them themselves. What changes the weights is lost when they are
    read again, and so is refused where it is seen: other parameters than those that are read.

    Attributes:
        turn: of the models that give up their weights for this one, and it for them. Without one it keeps them from
            its first forward on.

    Args:
        read: makes the model anew, with its weights.
        device: where the weights are wanted.

    Raises:
        ValueError: the model has parameters now that it was not read with; a state dict while there are no weights.
    """

    turn: Turn | None = None

    def __init__(self, model: nn.Module, read: Callable[[], nn.Module], device: torch.device):
        self.execution_device = device  # which pipelines ask for
        self._model, self._read = model, read
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        self._give_up()
        add_hook_to_module(model, self)
        model.register_state_dict_pre_hook(self._check_here)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict]:
        if not self._here:
            self._fetch()
        return send_to_device((args, kwargs), self.execution_device)

    def _fetch(self) -> None:
        if self.turn is not None:
            if self.turn.holder is not None:
                self.turn.holder._give_up()
            self.turn.holder = self
        anew = self._read()
        read = dict(anew.named_parameters(remove_duplicate=False))
        for module in anew.modules():  # which may live on in a cycle of references
            module._parameters.clear()
        places = [
            (f"{path}.{name}" if path else name, module, name)
            for path, module in self._model.named_modules(remove_duplicate=False)
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        others = [path for path, _, _ in places if path not in read]
        if others:
            raise ValueError(
                f"{others[0]} is no weight that this {type(self._model).__name__} is read with: offload='model' keeps "
                "what is added to a model, and 'disk' does not"
            )
        moved: dict[int, nn.Parameter] = {}  # some have two places
        for path, module, name in places:
            parameter = read.pop(path)
            if id(parameter) not in moved:
                kept = parameter.to(self.execution_device)
                moved[id(parameter)] = nn.Parameter(kept, requires_grad=parameter.requires_grad)
            module._parameters[name] = moved[id(parameter)]
        self._here = True

    def _give_up(self) -> None:
        for module in self._model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    nothing = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                    module._parameters[name] = nn.Parameter(nothing, requires_grad=parameter.requires_grad)
        self._here = False

    def _check_here(self, *_: Any) -> None:
        if not self._here:
            raise ValueError(f"the weights of this {type(self._model).__name__} are on disk, from where it was read")


def is_on_disk(model: nn.Module) -> bool:
    return isinstance(getattr(model, "_hf_hook", None), DiskOffload)
