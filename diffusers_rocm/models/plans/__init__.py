"""Plans, one file per model family, named as upstream's model files."""

import difflib

from torch import nn

from . import transformer_flux
from .plan import TensorParallelPlan


TENSOR_PARALLEL_PLANS: dict[str, TensorParallelPlan] = {**transformer_flux.TENSOR_PARALLEL_PLANS}


def get_tensor_parallel_plan(model: nn.Module) -> TensorParallelPlan:
    """The plan for the model's very class, never for one with a similar name.

    Raises:
        ValueError: there is none; names the nearest classes that have one.
    """
    name = type(model).__name__
    if name not in TENSOR_PARALLEL_PLANS:
        near = difflib.get_close_matches(name, TENSOR_PARALLEL_PLANS, n=3, cutoff=0.0)
        raise ValueError(f"{name} has no tensor-parallel plan; the nearest classes with one: {', '.join(near)}")
    return TENSOR_PARALLEL_PLANS[name]
