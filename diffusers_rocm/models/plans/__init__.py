"""Plans, one file per model family, named as upstream's model files."""

import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from .context_plan import ContextParallelPlan
from .plan import TensorParallelPlan
from .without_plan import WITHOUT_CONTEXT_PARALLEL_PLAN, WITHOUT_TENSOR_PARALLEL_PLAN


TENSOR_PARALLEL_PLANS: dict[str, TensorParallelPlan] = {}
CONTEXT_PARALLEL_PLANS: dict[str, ContextParallelPlan] = {}

for _file in pkgutil.iter_modules(__path__):
    if any(word in _file.name for word in ("transformer", "controlnet", "nextdit")):
        _family = importlib.import_module(f"{__name__}.{_file.name}")
        TENSOR_PARALLEL_PLANS |= getattr(_family, "TENSOR_PARALLEL_PLANS", {})
        CONTEXT_PARALLEL_PLANS |= getattr(_family, "CONTEXT_PARALLEL_PLANS", {})


def get_tensor_parallel_plan(cls: type[nn.Module]) -> TensorParallelPlan:
    """The plan for this very class, or the one that it declares itself like; never for one with a similar name.

    A subclass of a class with plans declares `parallel_plans_of = ThatClass` if its modules are the same.

    Raises:
        ValueError: there is none; says why, where that is known, and names the nearest classes that have one.
    """
    name = _planned(cls)
    if name not in TENSOR_PARALLEL_PLANS:
        raise ValueError(f"{cls.__name__} has no tensor-parallel plan{_instead(cls, 'tensor')}")
    return TENSOR_PARALLEL_PLANS[name]


def get_context_parallel_plan(
    cls: type[nn.Module], cp_plan: Mapping[str, Any] | ContextParallelPlan | None = None
) -> ContextParallelPlan:
    """The plan for a model class, found as its tensor-parallel plan is: ours, else diffusers' `_cp_plan`
    in its own body.

    `cp_plan` takes its place, or, in diffusers' format, the place of its modules.

    Raises:
        ValueError: there is none, or one of diffusers' that is wrong; names the nearest classes that have one.
    """
    name = _planned(cls)
    plan = CONTEXT_PARALLEL_PLANS.get(name)
    if isinstance(cp_plan, ContextParallelPlan):
        return cp_plan
    if cp_plan is None and plan is None and name not in WITHOUT_CONTEXT_PARALLEL_PLAN:
        cp_plan = vars(cls).get("_cp_plan")
    if cp_plan is not None:
        return ContextParallelPlan(cp_plan, ordered=False) if plan is None else replace(plan, modules=cp_plan)
    if plan is None:
        message = f"{cls.__name__} has no context-parallel plan{_instead(cls, 'context')}"
        raise ValueError(f"{message}; or pass one as cp_plan=")
    return plan


def has_plan(cls: type[nn.Module]) -> bool:
    """Whether `get_tensor_parallel_plan` knows the class."""
    return _planned(cls) in TENSOR_PARALLEL_PLANS


def _planned(cls: type[nn.Module]) -> str | None:
    """The name of the class of diffusers whose plans this one has; None for another class, even of the same name."""
    like = vars(cls).get("parallel_plans_of", cls)
    if not isinstance(like, type) or not issubclass(cls, like):
        named = getattr(like, "__name__", repr(like))
        raise ValueError(f"{cls.__name__} says parallel_plans_of = {named}, which is not among its base classes")
    return like.__name__ if like.__module__.partition(".")[0] == "diffusers" else None


def _instead(cls: type[nn.Module], kind: str) -> str:
    """Why a class has no plan of this kind, and which have."""
    reasons, plans = {
        "tensor": (WITHOUT_TENSOR_PARALLEL_PLAN, TENSOR_PARALLEL_PLANS),
        "context": (WITHOUT_CONTEXT_PARALLEL_PLAN, CONTEXT_PARALLEL_PLANS),
    }[kind]
    base = next((name for name in map(_planned, cls.__mro__[1:]) if name in plans), None)
    if base is not None:
        return (
            f", and may differ from its base class {base}, which has one; if its modules and its forward are those of "
            f"{base}, say so in its body: parallel_plans_of = {base}"
        )
    reason = f": {reasons[cls.__name__]}" if _planned(cls) in reasons else ""
    near = difflib.get_close_matches(cls.__name__, plans, n=3, cutoff=0.0)
    return f"{reason}; the nearest classes with one: {', '.join(near)}"
