"""One pipeline of each family through `parallelize`: the whole loop, with guidance where it has any, on real ranks."""

import math
import unittest

from parameterized import parameterized

from diffusers_rocm import ParallelConfig, parallelize

from ..models.testing_utils.parallelism import FLOAT32_BAR
from ..testing_utils import relative_l2, run_ranks, slow
from .testing_utils import PIPELINES, build, latents


FEW = [{"tp": 2}, {"ulysses": 2}]
MORE = [{"ring": 2}, {"tp": 3}, {"ulysses": 2, "tp": 2}]


def whole_loop_worker(name: str, meshes: list[dict[str, int]]) -> list[float]:
    """The error of each mesh."""
    pipe, call = build(name), PIPELINES[name].call
    wanted = latents(pipe, call(2))
    errors = []
    for mesh in meshes:
        pipe = build(name)
        parallelize(pipe, ParallelConfig(**mesh))
        errors.append(relative_l2(latents(pipe, call(2)), wanted))
    return errors


class TestFamilies(unittest.TestCase):
    @parameterized.expand([(name,) for name in PIPELINES])
    def test_whole_loop(self, name):
        for errors in run_ranks(2, whole_loop_worker, name, FEW):
            assert max(errors) <= FLOAT32_BAR, dict(zip(map(str, FEW), errors, strict=True))

    @parameterized.expand([(name, mesh) for name in PIPELINES for mesh in MORE])
    @slow
    def test_whole_loop_of_more_meshes(self, name, mesh):
        for (error,) in run_ranks(math.prod(mesh.values()), whole_loop_worker, name, [mesh]):
            assert error <= FLOAT32_BAR, error


if __name__ == "__main__":
    unittest.main()
