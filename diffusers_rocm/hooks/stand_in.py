"""Classes that take the place of another in a living object: its `__class__` is set, every reference stays good."""

import functools
from collections.abc import Callable


def stands_in_for(cls: type) -> Callable[[type], type]:
    """Decorates a subclass of `cls` that answers to its name, in messages, plans and checkpoints."""

    def named(subclass: type) -> type:
        @functools.wraps(cls.__init__)  # diffusers looks at the signature
        def made_plain(self, *args, **kwargs):
            # By `type(pipe)(...)`, say: nothing hangs on the new one.
            self.__class__ = cls
            cls.__init__(self, *args, **kwargs)

        subclass.__init__ = made_plain
        subclass.__name__, subclass.__qualname__, subclass.__module__ = cls.__name__, cls.__qualname__, cls.__module__
        subclass.stands_in = True
        return subclass

    return named


def wrap_get_signature_types(original: classmethod) -> classmethod:
    """Of a pipeline: `from_pipe` leaves out components that are not of the very types that this answers."""

    @functools.wraps(original.__func__)
    def get_signature_types(cls) -> dict[str, tuple]:
        found = original.__func__(cls)
        return {name: (*types, *_standing_in(types)) for name, types in found.items()}

    return classmethod(get_signature_types)


def _standing_in(types: tuple) -> list[type]:
    classes = [each for each in types if isinstance(each, type)]
    found = [sub for each in classes for sub in type.__subclasses__(each) if vars(sub).get("stands_in")]
    return found + _standing_in(tuple(found)) if found else []
