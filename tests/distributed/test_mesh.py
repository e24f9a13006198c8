"""Degrees in, axes out: the arithmetic, the errors, the groups and the order of the ranks."""

import itertools
import math
import re
import unittest

import diffusers
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from parameterized import parameterized
from torch.distributed.device_mesh import init_device_mesh

import diffusers_rocm
from diffusers_rocm import (
    CFGParallelConfig,
    ContextParallelConfig,
    DataParallelConfig,
    ParallelConfig,
    TensorParallelConfig,
)
from diffusers_rocm.distributed.mesh import AXES, Axes, mesh_axes, resolve_degrees

from ..testing_utils import message_of, run_ranks


def offered(message: str) -> list[dict[str, int]]:
    """The configs that a message proposes."""
    choices = re.findall(r"ParallelConfig\(([^)]*)\)", message)
    return [{name: int(size) for name, size in re.findall(r"(\w+)=(-?\d+)", choice)} for choice in choices]


degrees = st.dictionaries(st.sampled_from(AXES), st.integers(1, 12), max_size=5).map(
    lambda given: {name: min(degree, 2) if name == "cfg" else degree for name, degree in given.items()}
)


class TestResolveDegrees(unittest.TestCase):
    @parameterized.expand(
        [
            ({}, 1, (1, 1, 1, 1, 1)),
            ({"tp": 4}, 4, (1, 1, 1, 1, 4)),
            ({"dp": -1}, 6, (6, 1, 1, 1, 1)),
            ({"dp": -1, "tp": 2}, 8, (4, 1, 1, 1, 2)),
            ({"cfg": 2, "ring": -1, "ulysses": 2}, 8, (1, 2, 2, 2, 1)),
            ({"tp": -1, "dp": 2}, 2, (2, 1, 1, 1, 1)),
            ({"tp": -1}, 1, (1, 1, 1, 1, 1)),
        ]
    )
    def test_degrees(self, given, world, expected):
        assert tuple(resolve_degrees(given, world).values()) == expected
        assert tuple(resolve_degrees(given, world)) == AXES

    @parameterized.expand(
        [
            ({"tp": 2}, 8, ("tp=2, but 8 rank(s) were started; start 2, or use",)),
            ({"ring": 2, "tp": 2}, 8, ("ring=2 * tp=2 = 4, but 8 rank(s) were started; start 4, or use",)),
            (
                {"ring": 4, "tp": 4},
                8,
                ("ring=4 * tp=4 = 16, but 8 rank(s) were started", "ParallelConfig(ring=2, tp=4)"),
            ),
            (
                {"dp": -1, "tp": 3},
                8,
                ("dp=-1 * tp=3: 8 rank(s) were started, which 3 does not divide", "multiple of 3"),
            ),
            ({"dp": -1, "tp": -1}, 8, ("dp=-1 * tp=-1: only one degree may be -1",)),
            ({"tp": -1, "dp": 3}, 2, ("2 rank(s) were started, which 3 does not divide", "ParallelConfig(dp=2)")),
        ]
    )
    def test_errors(self, given, world, parts):
        message = message_of(resolve_degrees, given, world)
        assert all(part in message for part in parts), message

    @given(degrees, st.integers(1, 64))
    @settings(max_examples=300, deadline=None)
    @example({"tp": 3}, 1)
    @example({"ring": 3, "tp": 3}, 1)
    @example({"cfg": 2, "tp": 3}, 8)
    def test_what_is_offered_is_legal(self, given, world):
        known = math.prod(given.values())
        if known == world:
            assert math.prod(resolve_degrees(given, world).values()) == world
            return
        message = message_of(resolve_degrees, given, world)
        assert f"start {known}" in message
        choices = offered(message)
        assert choices, message
        for choice in choices:
            ParallelConfig(**choice)
            assert math.prod(resolve_degrees(choice, world).values()) == world
            assert choice.get("cfg", 1) <= 2, "guidance has two branches"

    @given(degrees, st.sampled_from(AXES), st.integers(1, 64))
    @settings(max_examples=300, deadline=None)
    @example({"tp": 3}, "dp", 1)
    @example({"tp": 3}, "cfg", 8)
    def test_the_rest(self, given, name, world):
        given = {**given, name: -1}
        known = math.prod(degree for degree in given.values() if degree != -1)
        if world % known == 0:
            resolved = resolve_degrees(given, world)
            assert resolved[name] == world // known and math.prod(resolved.values()) == world
            assert all(resolved[axis] == degree for axis, degree in given.items() if degree != -1)
            return
        choices = offered(message_of(resolve_degrees, given, world))
        assert choices
        for choice in choices:
            ParallelConfig(**choice)
            assert math.prod(resolve_degrees(choice, world).values()) == world


class TestParallelConfig(unittest.TestCase):
    def test_exported(self):
        names = ["CFGParallelConfig", "ContextParallelConfig", "DataParallelConfig", "ParallelConfig"]
        for name in [*names, "TensorParallelConfig"]:
            assert name in diffusers_rocm.__all__ and isinstance(getattr(diffusers_rocm, name), type)

    def test_every_argument(self):
        config = ParallelConfig(dp=2, cfg=2, ring=3, ulysses=4, tp=5, rotate_method="allgather")
        assert config.degrees() == {"dp": 2, "cfg": 2, "ring": 3, "ulysses": 4, "tp": 5}
        assert tuple(config.degrees()) == AXES
        assert config.rotate_method == "allgather" and config.mesh is None
        assert repr(config) == "ParallelConfig(dp=2, cfg=2, ring=3, ulysses=4, tp=5)"
        plain = ParallelConfig()
        assert set(plain.degrees().values()) == {1} and plain.rotate_method == "p2p"
        assert ParallelConfig(tp=-1).tp == -1

    @parameterized.expand(
        [
            (CFGParallelConfig(), "CFGParallelConfig(cfg=2)", {"cfg": 2}),
            (DataParallelConfig(3), "DataParallelConfig(dp=3)", {"dp": 3}),
            (TensorParallelConfig(4), "TensorParallelConfig(tp=4)", {"tp": 4}),
            (
                ContextParallelConfig(2, 3),
                "ContextParallelConfig(ring_degree=2, ulysses_degree=3, rotate_method='p2p')",
                {"ring": 2, "ulysses": 3},
            ),
        ]
    )
    def test_the_others(self, config, shown, given):
        assert repr(config) == shown and config.degrees() == given

    def test_they_are_those_of_diffusers(self):
        assert isinstance(ParallelConfig(tp=2), diffusers.ParallelConfig)
        assert isinstance(ContextParallelConfig(2), diffusers.ContextParallelConfig)

    def test_inner_configs(self):
        ours = ContextParallelConfig(2, 3, rotate_method="allgather")
        config = ParallelConfig(context_parallel_config=ours, tensor_parallel_config=TensorParallelConfig(4), dp=2)
        assert tuple(config.degrees().values()) == (2, 1, 2, 3, 4) and config.rotate_method == "allgather"
        assert ParallelConfig(ours, ring=2, ulysses=3).rotate_method == "allgather"
        assert ParallelConfig(ours, rotate_method="p2p").rotate_method == "p2p"
        theirs = ParallelConfig(diffusers.ContextParallelConfig(ulysses_degree=2))
        assert (theirs.ring, theirs.ulysses, theirs.rotate_method) == (1, 2, "p2p")
        if hasattr(diffusers, "TensorParallelConfig"):
            tp = diffusers.TensorParallelConfig(tp_degree=3)
            assert ParallelConfig(tensor_parallel_config=tp).tp == 3

    @parameterized.expand(
        [
            ({"tp": 0}, ("tp", "at least 1, or -1", "got 0")),
            ({"dp": -2}, ("dp", "got -2")),
            ({"cfg": 2.0}, ("cfg", "got 2.0")),
            ({"ring": True}, ("ring", "got True")),
            ({"ulysses": "2"}, ("ulysses", "got '2'")),
            ({"tp": -1, "dp": -1}, ("only one degree may be -1",)),
            ({"ring": 2, "rotate_method": "alltoall"}, ("rotate_method", "'alltoall'")),
            ({"context_parallel_config": ContextParallelConfig(2), "ring": 4}, ("ring=4", "says 2", "one of them")),
            ({"context_parallel_config": ContextParallelConfig(2), "ulysses": 2}, ("ulysses=2", "says 1")),
            ({"tensor_parallel_config": TensorParallelConfig(2), "tp": 3}, ("tp=3", "says 2")),
            ({"mesh": "cpu"}, ("DeviceMesh", "str")),
        ]
    )
    def test_contradictions(self, arguments, parts):
        message = message_of(ParallelConfig, **arguments)
        assert all(part in message for part in parts), message

    @parameterized.expand([(CFGParallelConfig, 0), (CFGParallelConfig, -1), (DataParallelConfig, 1.5)])
    def test_one_axis_has_no_rest(self, cls, degree):
        assert repr(degree) in message_of(cls, degree)


class TestWithoutAProcessGroup(unittest.TestCase):
    def test_one_rank(self):
        assert str(mesh_axes(ParallelConfig().degrees())) == "one rank"
        assert all(getattr(Axes.of_mesh(None), name).size == 1 for name in (*AXES, "world"))

    @parameterized.expand([(ParallelConfig(dp=2, tp=3), "--nproc_per_node=6"), (ParallelConfig(tp=-1), "=N")])
    def test_several(self, config, part):
        message = message_of(config.axes)
        assert "torchrun" in message and part in message and "diffusers_rocm.init()" in message


def members(axis) -> list[int]:
    return dist.get_process_group_ranks(axis.group) if axis.group is not None else [dist.get_rank()]


JOINED = {name: (name,) for name in AXES} | {
    "context": ("ring", "ulysses"),
    "model": ("ring", "ulysses", "tp"),
    "replica": ("cfg", "ring", "ulysses", "tp"),
    "world": AXES,
}


def members_worker(mesh: dict[str, int], own: bool = False) -> dict[str, tuple]:
    """Of each axis: the ranks on it, this one's place, and the source of its broadcasts."""
    names, sizes = zip(*mesh.items(), strict=True)
    config = (
        ParallelConfig(mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names)) if own else ParallelConfig(**mesh)
    )
    axes = config.axes()
    for name in JOINED:
        axis, ones = getattr(axes, name), torch.ones(1)
        if axis.group is not None:
            dist.all_reduce(ones, group=axis.group)
        assert ones.item() == axis.size == len(members(axis))
    return {name: (members(axis := getattr(axes, name)), axis.rank, axis.first) for name in JOINED}


def expected_members(mesh: dict[str, int], name: str, rank: int) -> list[int]:
    """The ranks whose place differs from this one's on the axes of `name` alone: the last of `AXES` counts fastest."""
    places = list(itertools.product(*(range(mesh.get(axis, 1)) for axis in AXES)))
    fixed = [index for index, axis in enumerate(AXES) if axis not in JOINED[name]]
    return [each for each, place in enumerate(places) if all(place[i] == places[rank][i] for i in fixed)]


def groups_worker() -> dict[str, bool]:
    def groups(config) -> list:
        return [getattr(config.axes(), name).group for name in JOINED]

    before = groups(ParallelConfig(dp=2, tp=2))
    made = dist.distributed_c10d.get_pg_count()
    again = groups(ParallelConfig(dp=-1, tensor_parallel_config=TensorParallelConfig(2)))
    counted = dist.distributed_c10d.get_pg_count()
    other = groups(ParallelConfig(ring=2, tp=2))
    return {
        "same objects": all(x is y for x, y in zip(before, again, strict=True)),
        "none made": made == counted,
        "others for other degrees": other[AXES.index("ring")] is not None
        and dist.distributed_c10d.get_pg_count() > made,
    }


def beside_worker() -> dict[str, list[int]]:
    """An axis of the caller's own between two of ours."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("ring", "mine", "tp"))
    config = ParallelConfig(mesh=mesh)
    assert config.degrees() == {"dp": 1, "cfg": 1, "ring": 2, "ulysses": 1, "tp": 2}
    axes = config.axes()
    return {name: members(getattr(axes, name)) for name in ("ring", "tp", "world")}


def own_mesh_errors_worker() -> dict[str, str]:
    def mesh(*names: str):
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=names or None)

    return {
        "order": message_of(ParallelConfig, mesh=mesh("tp", "ring")),
        "unknown": message_of(ParallelConfig, mesh=mesh("data", "model")),
        "no names": message_of(ParallelConfig, mesh=mesh()),
        "degree": message_of(ParallelConfig, mesh=mesh("dp", "tp"), tp=4),
        "inside": message_of(ParallelConfig, ContextParallelConfig(mesh=mesh("ring", "ulysses"))),
        "context order": message_of(ContextParallelConfig, mesh=mesh("ulysses", "ring")),
        "rest": str(ParallelConfig(mesh=mesh("dp", "tp"), tp=-1)),
        "rotate": ParallelConfig(mesh=mesh("ring", "tp"), rotate_method="allgather").rotate_method,
    }


class TestMeshAxes(unittest.TestCase):
    def check(self, mesh: dict[str, int], own: bool = False) -> None:
        for rank, axes in enumerate(run_ranks(math.prod(mesh.values()), members_worker, mesh, own)):
            for name in JOINED:
                ranks = expected_members(mesh, name, rank)
                place = ranks.index(rank), ranks[0] if len(ranks) > 1 else 0
                assert axes[name] == (ranks, *place), (rank, name, axes[name], ranks)

    @parameterized.expand([({"dp": 2, "tp": 2},), ({"tp": 2, "cfg": 2},), ({"ulysses": 2, "ring": 3},)])
    def test_the_order_of_ranks(self, mesh):
        self.check({name: mesh[name] for name in AXES if name in mesh})

    @parameterized.expand([(names,) for names in itertools.combinations(AXES, 3)])
    def test_the_order_of_eight_ranks(self, names):
        self.check(dict.fromkeys(names, 2))

    def test_eight_ranks_by_hand(self):
        """Neighbours share the weights, next come those that share a sequence, then the branches of guidance."""
        axes = run_ranks(8, members_worker, {"cfg": 2, "ulysses": 2, "tp": 2})[5]
        assert [axes[name][0] for name in ("tp", "ulysses", "cfg")] == [[4, 5], [5, 7], [1, 5]]
        assert axes["model"][0] == [4, 5, 6, 7] and axes["context"][0] == [5, 7] and axes["dp"][0] == [5]

    @parameterized.expand([(("dp", "tp"),), (("ring", "ulysses"),), (("cfg", "tp"),)])
    def test_own_mesh(self, names):
        self.check(dict.fromkeys(names, 2), own=True)

    def test_own_mesh_with_other_axes(self):
        """Each of the two replicas that the package knows nothing of has its own axes."""
        for rank, places in enumerate(run_ranks(8, beside_worker)):
            here = rank % 4 - rank % 2  # the first of those that differ in tp alone
            assert places["tp"] == [rank - rank % 2, rank - rank % 2 + 1], (rank, places)
            assert places["ring"] == [rank % 4, rank % 4 + 4], (rank, places)
            assert places["world"] == [here, here + 1, here + 4, here + 5], (rank, places)

    def test_groups_are_made_once(self):
        for results in run_ranks(4, groups_worker):
            assert all(results.values()), results

    def test_errors_of_own_meshes(self):
        messages, *others = run_ranks(4, own_mesh_errors_worker)
        assert others == [messages] * 3
        assert "nested as dp, cfg, ring, ulysses, tp" in messages["order"] and "('tp', 'ring')" in messages["order"]
        assert (
            "needs an axis named 'dp' or 'cfg'" in messages["unknown"] and "('data', 'model')" in messages["unknown"]
        )
        assert "no names" in messages["no names"]
        assert messages["degree"] == "tp=4, but the mesh's tp axis has 2 ranks; drop tp"
        assert "belongs to the ParallelConfig" in messages["inside"]
        assert "nested as ring, ulysses" in messages["context order"]
        assert messages["rest"] == "ParallelConfig(dp=2, cfg=1, ring=1, ulysses=1, tp=2)"
        assert messages["rotate"] == "allgather"


if __name__ == "__main__":
    unittest.main()
