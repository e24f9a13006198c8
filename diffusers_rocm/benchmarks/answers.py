"""What a pipeline's models answered in a run, and what those of another answer to the same: how runs are compared.

Pictures drift apart in many steps, in 16 bits with any other kernel as well; answers to the same do not.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from ..hooks.around_call import AroundCall
from ..pipelines.denoisers import DENOISERS
from ..pipelines.generation import GenerationRequest
from .distance import bar_of, distance
from .known_models import count_blocks


@dataclass
class _Call:
    """Of a component's method: what it was given, on the CPU, with the device of each tensor; what it answered."""

    component: str
    method: str
    given: list[tuple[Any, torch.device | None]]
    spec: TreeSpec
    answer: list[Tensor]


class Answers:
    """Of the run of a pipeline's models.

    Attributes:
        blocks: of the denoiser.
        first: what its first forward answered, to what the text encoders made of the prompt.
        forwards: the last two: both branches of guidance, where these are one after the other.
        decoded: the last call of the VAE's decoder, if that is heard.
    """

    def __init__(self) -> None:
        self.blocks = 0
        self.first: list[Tensor] = []
        self.forwards: deque[_Call] = deque(maxlen=2)
        self.decoded: deque[_Call] = deque(maxlen=1)
        self._hooks: list[_Heard] = []

    def hear(self, pipe: DiffusionPipeline, decoder: bool = False) -> None:
        """Of all denoisers, from here on."""
        denoisers = {name: pipe.components[name] for name in DENOISERS if pipe.components.get(name) is not None}
        self.blocks = count_blocks(next(iter(denoisers.values())))
        self._hooks = [_Heard(module, name, self) for name, module in denoisers.items()]
        if decoder and pipe.components.get("vae") is not None:
            decode = pipe.vae.decode

            def heard(*args: Any, **kwargs: Any) -> Any:
                return _keep(self.decoded, "vae", "decode", decode, args, kwargs)

            pipe.vae.decode = heard

    def forget_denoisers(self) -> None:
        """Hear them no longer."""
        while self._hooks:
            self._hooks.pop().remove()

    def forward(self, component: str, call: Callable, args: tuple, kwargs: dict) -> Any:
        """Stands for the call."""
        answer = _keep(self.forwards, component, "__call__", call, args, kwargs)
        self.first = self.first or self.forwards[-1].answer
        return answer

    @property
    def last(self) -> list[list[Tensor]]:
        """What was answered to the calls that are kept."""
        return [call.answer for call in (*self.forwards, *self.decoded)]

    @torch.no_grad()
    def ask(self, pipe: DiffusionPipeline) -> list[list[Tensor]]:
        """What a pipeline's models answer to the calls that are kept."""
        answers = []
        for call in (*self.forwards, *self.decoded):
            leaves = [x if device is None else x.to(device) for x, device in call.given]
            args, kwargs = tree_unflatten(leaves, call.spec)
            answers.append(_tensors(getattr(pipe.components[call.component], call.method)(*args, **kwargs)))
        return answers


class _Heard(AroundCall):
    """No hook of torch: a step that is replayed from a graph calls none."""

    def __init__(self, denoiser: nn.Module, name: str, answers: Answers):
        super().__init__(denoiser)
        self._name, self._answers = name, answers

    def around(self, call: Callable, args: tuple, kwargs: dict) -> Any:
        return self._answers.forward(self._name, call, args, kwargs)


def _keep(calls: deque[_Call], component: str, method: str, call: Callable, args: tuple, kwargs: dict) -> Any:
    leaves, spec = tree_flatten((args, kwargs))
    given = [(_copy(x), x.device) if isinstance(x, Tensor) else (x, None) for x in leaves]
    answer = call(*args, **kwargs)
    calls.append(_Call(component, method, given, spec, _tensors(answer)))
    return answer


def _tensors(answer: Any) -> list[Tensor]:
    return [_copy(x) for x in tree_leaves(answer) if isinstance(x, Tensor) and x.is_floating_point()]


def _copy(x: Tensor) -> Tensor:
    """Of its own, which a prediction that is yet to come may be asked for, too."""
    return x.to("cpu", copy=True)


def farthest(answers: list[list[Tensor]], wanted: list[list[Tensor]]) -> float:
    """Of answers to the same calls, the largest relative L2; NaN where there is one."""
    if [[x.shape for x in answer] for answer in answers] != [[x.shape for x in answer] for answer in wanted]:
        return math.inf
    pairs = zip(sum(answers, []), sum(wanted, []), strict=True)
    return torch.tensor([0.0, *(distance(x, y) for x, y in pairs)], dtype=torch.float64).max().item()


def bar_for(request: GenerationRequest, answers: Answers, device: torch.device) -> float:
    """How far an answer may be from that of one rank."""
    return bar_of(answers.blocks, request.dtype_on(device), request.is_lossy)
