"""Classes that take the place of another in a living object: its `__class__` is set, every reference stays good."""

from collections.abc import Callable


def stands_in_for(cls: type) -> Callable[[type], type]:
    """Decorates a subclass of `cls` that answers to its name, in messages, plans and checkpoints."""

    def named(subclass: type) -> type:
        subclass.__name__, subclass.__qualname__, subclass.__module__ = cls.__name__, cls.__qualname__, cls.__module__
        return subclass

    return named
