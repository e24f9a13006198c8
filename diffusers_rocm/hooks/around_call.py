"""What happens around a whole call of a module: outside its hooks, and outside what `module.compile()` compiles.

A hook of torch cannot leave the module's own forward out, and one that talks to other ranks would break a graph.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .stand_in import stands_in_for


class AroundCall:
    """Hangs on a module until `remove()`; what is hung later is further out."""

    def __init__(self, module: nn.Module):
        self._module = module
        if "around_call" not in vars(module):
            module.around_call = []
            module.__class__ = _around_class(type(module))
        module.around_call.append(self)

    def around(self, call: Callable, args: tuple, kwargs: dict) -> Any:
        """Stands for `call(*args, **kwargs)`."""
        raise NotImplementedError

    def before_moving(self) -> None:
        """The module's weights go to another device, or become another dtype."""

    def remove(self) -> None:
        self._module.around_call.remove(self)
        if not self._module.around_call:
            del self._module.around_call
            self._module.__class__ = type(self._module).__base__


@functools.cache
def _around_class(cls: type[nn.Module]) -> type[nn.Module]:
    @stands_in_for(cls)
    class Around(cls):
        @functools.wraps(cls.__call__)
        def __call__(self, *args, **kwargs):
            if torch.compiler.is_compiling():
                raise ValueError(
                    f"a parallel {cls.__name__} of a pipeline is compiled in place: {cls.__name__}.compile() or "
                    "compile_repeated_blocks(), not torch.compile()"
                )
            call = super().__call__
            for each in self.around_call:
                call = functools.partial(_one, each, call)
            return call(*args, **kwargs)

        def _apply(self, *args, **kwargs):
            for each in self.around_call:
                each.before_moving()
            return super()._apply(*args, **kwargs)

    return Around


def _one(each: AroundCall, call: Callable, *args, **kwargs) -> Any:
    return each.around(call, args, kwargs)
