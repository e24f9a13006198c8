"""What tests of loading share."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from diffusers_rocm.loaders.stored_tensor import StoredTensor


@contextmanager
def elements_read() -> Iterator[list[int]]:
    """The numbers of elements of what is read from checkpoints in here."""
    counts: list[int] = []
    read = StoredTensor.read

    def counted(self, into, *args):
        counts.append(into.numel())
        read(self, into, *args)

    with mock.patch.object(StoredTensor, "read", counted):
        yield counts
