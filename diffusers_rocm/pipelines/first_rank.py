"""What one rank computes for those that share a picture with it."""

import importlib
import json
from collections.abc import Callable
from typing import Any

import torch
from diffusers.utils import BaseOutput
from torch import Tensor
from transformers.utils import ModelOutput

from ..distributed.agreement import fail_together
from ..distributed.axis import Axis
from ..distributed.collectives import all_gather_text, broadcast_from_first


OUTPUTS = (BaseOutput, ModelOutput)


def answer_of_first_rank(what: str, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any], axis: Axis) -> Any:
    """`call(*args, **kwargs)` of the axis' first rank, on all of them; the tensors go into allocated buffers.

    The answer is made of tensors, lists and outputs of diffusers or transformers; of anything else in it, a cache of
    keys, say, the others get None.

    Raises:
        RuntimeError: the first rank could not do `what`.
    """
    answer, tensors, text = None, [], "{}"
    with fail_together(what, axis):
        if axis.rank == 0:
            answer = call(*args, **kwargs)
            text = json.dumps(_take_apart(answer, tensors))
    described = json.loads(all_gather_text(text, axis)[0])
    if axis.rank > 0:
        given = (x.device for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        device = next(given, axis.device)  # of a call without tensors too: the first rank is about to send
        _collect(described, tensors, device)
    tensors = [broadcast_from_first(x, axis) for x in tensors]
    return answer if axis.rank == 0 else _put_together(described, tensors)


def _take_apart(value: Any, tensors: list[Tensor]) -> Any:
    """`value` in the words of JSON, its tensors moved to a list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"shape": [*value.shape], "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, OUTPUTS):
        items = {name: _take_apart(item, tensors) for name, item in value.items()}
        return {"module": type(value).__module__, "class": type(value).__qualname__, "items": items}
    if isinstance(value, (list, tuple)):
        return [_take_apart(item, tensors) for item in value]
    return value if isinstance(value, (int, float, str, bool)) else None


def _collect(described: Any, tensors: list[Tensor], device: torch.device) -> None:
    """Room for the tensors of a description, in their order."""
    if isinstance(described, list):
        for item in described:
            _collect(item, tensors, device)
    elif isinstance(described, dict) and "shape" in described:
        tensors.append(torch.empty(described["shape"], dtype=getattr(torch, described["dtype"]), device=device))
    elif isinstance(described, dict):
        _collect([*described["items"].values()], tensors, device)


def _put_together(described: Any, tensors: list[Tensor]) -> Any:
    if isinstance(described, list):
        return tuple(_put_together(item, tensors) for item in described)
    if isinstance(described, dict) and "shape" in described:
        return tensors.pop(0)
    if not isinstance(described, dict):
        return described
    cls = getattr(importlib.import_module(described["module"]), described["class"])
    assert issubclass(cls, OUTPUTS)
    return cls(**{name: _put_together(item, tensors) for name, item in described["items"].items()})
