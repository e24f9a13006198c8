"""Every legal mesh of 2, 3, 4, 6 and 8 ranks: the whole loop with guidance, against one process."""

import itertools
import math
import unittest

import torch
from parameterized import parameterized

from diffusers_rocm import ParallelConfig, parallelize
from diffusers_rocm.distributed.mesh import AXES

from ..models.testing_utils.parallelism import FLOAT32_BAR
from ..testing_utils import relative_l2, run_ranks, slow
from .testing_utils import PIPELINES, build, latents


HEADS = {"flux": 8, "wan": 5}


def legal_meshes(heads: int, world: int) -> list[tuple[int, ...]]:
    """(dp, cfg, ring, ulysses, tp) of `world` ranks: two branches of guidance, and a head to trade for every rank."""
    divisors = [degree for degree in range(1, world + 1) if world % degree == 0]
    meshes = [mesh for mesh in itertools.product(divisors, repeat=len(AXES)) if math.prod(mesh) == world]
    return [
        (dp, cfg, ring, ulysses, tp) for dp, cfg, ring, ulysses, tp in meshes if cfg <= 2 and ulysses <= heads // tp
    ]


TABLE = [(name, mesh) for world in (2, 3, 4, 6, 8) for name in HEADS for mesh in legal_meshes(HEADS[name], world)]

# The fast ones: all of 2 and 3 ranks, and of 4 those in which two axes meet.
FEW = {(2, 1, 1, 1, 2), (2, 2, 1, 1, 1), (1, 2, 1, 2, 1), (1, 2, 2, 1, 1), (1, 1, 2, 2, 1)}


def is_fast(mesh: tuple[int, ...]) -> bool:
    return math.prod(mesh) < 4 or mesh in FEW


def arguments_of(index: int, name: str, mesh: tuple[int, ...]) -> dict:
    """Replicas make several pictures, sometimes one less than would be even, by one generator or by one for each."""
    dp = mesh[0]
    prompts = 1 + index % 2 if dp == 1 else 2 * dp - index % 2
    generators = [torch.Generator().manual_seed(seed) for seed in range(prompts)]
    return {**PIPELINES[name].call(prompts), "generator": generators if index // 2 % 2 else generators[0]}


def mesh_worker(index: int, name: str, mesh: tuple[int, ...]) -> tuple[float, int]:
    """The worst picture's error, and how many pictures there are."""
    single, pipe = build(name), build(name)
    wanted = latents(single, arguments_of(index, name, mesh), seed=None, steps=2)
    axes = parallelize(pipe, ParallelConfig(**dict(zip(AXES, mesh, strict=True))))
    assert tuple(getattr(axes, axis).size for axis in AXES) == mesh
    output = latents(pipe, arguments_of(index, name, mesh), seed=None, steps=2)
    assert output.shape == wanted.shape
    return max(relative_l2(*pair) for pair in zip(output, wanted, strict=True)), len(output)


class TestMeshes(unittest.TestCase):
    def check(self, index, name, mesh):
        for error, count in run_ranks(math.prod(mesh), mesh_worker, index, name, mesh):
            assert error <= FLOAT32_BAR and count >= mesh[0], (error, count)

    @parameterized.expand([(index, *case) for index, case in enumerate(TABLE) if is_fast(case[1])])
    def test_whole_loop(self, index, name, mesh):
        self.check(index, name, mesh)

    @parameterized.expand([(index, *case) for index, case in enumerate(TABLE) if not is_fast(case[1])])
    @slow
    def test_whole_loop_of_many_ranks(self, index, name, mesh):
        self.check(index, name, mesh)

    def test_the_table_is_complete(self):
        meshes = {name: [mesh for each, mesh in TABLE if each == name] for name in HEADS}
        assert all(len(set(each)) == len(each) for each in meshes.values())
        # One prime factor may be on any axis, but 3 not on cfg; those of 4 and 8 anywhere, with at most one on cfg.
        assert len(meshes["flux"]) == 5 + 4 + 14 + 20 + 30
        illegal = [mesh for mesh in meshes["flux"] if mesh not in meshes["wan"]]
        assert all(mesh[3] * mesh[4] > 5 or mesh[3] > 5 // mesh[4] for mesh in illegal) and (1, 1, 1, 8, 1) in illegal


if __name__ == "__main__":
    unittest.main()
