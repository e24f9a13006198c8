"""Models whose weights are read when they work, and given up when the next one does."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.utils import send_to_device
from torch import Tensor, nn


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
        read = dict(anew.named_parameters())
        for module in anew.modules():  # which may live on in a cycle of references
            module._parameters.clear()
        others = [path for path, _ in self._model.named_parameters() if path not in read]
        if others:
            raise ValueError(
                f"{others[0]} is no weight that this {type(self._model).__name__} is read with: offload='model' keeps "
                "what is added to a model, and 'disk' does not"
            )
        self._replace(lambda path, _: read.pop(path).to(self.execution_device))
        self._here = True

    def _give_up(self) -> None:
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

    def _check_here(self, *_: Any) -> None:
        if not self._here:
            raise ValueError(f"the weights of this {type(self._model).__name__} are on disk, from where it was read")


def is_on_disk(model: nn.Module) -> bool:
    return isinstance(getattr(model, "_hf_hook", None), DiskOffload)
