"""Memsets of a captured graph, made kernels."""

import ctypes
import itertools
import unittest
from typing import Any
from unittest import mock

import pytest
import torch
from parameterized import parameterized

from diffusers_rocm.distributed import cuda_driver, graph_memsets
from diffusers_rocm.distributed.graph_calls import call_of_a_graph, current_call
from diffusers_rocm.distributed.graph_memsets import LONGEST, become_kernels
from diffusers_rocm.hooks.step_graph import record

from ..testing_utils import require_torch_accelerator


KERNEL, MEMSET = 0, 2


class Driver:
    """Has one graph, as CUDA's driver would: of each node its kind, what it writes, and what comes before it."""

    def __init__(self, *refuses: str):
        self.kinds, self.writes, self.before, self.refuses = {}, {}, {}, refuses
        self.numbers = itertools.count(1000)

    def add(self, kind: int, before: tuple[int, ...] = (), **writes: int) -> int:
        node = next(self.numbers)
        self.kinds[node], self.writes[node], self.before[node] = kind, writes, list(before)
        return node

    def call(self, function: str, *args: Any) -> None:
        if function in self.refuses:
            raise RuntimeError(function)
        getattr(self, function)(*args)

    def _list(self, nodes: list[int], into: Any, count: Any) -> None:
        count._obj.value = len(nodes)
        for index, node in enumerate(nodes if into is not None else ()):
            into[index] = node

    def cuGraphGetNodes(self, graph, into, count):
        self._list(list(self.kinds), into, count)

    def cuGraphNodeGetDependencies(self, node, into, count):
        self._list(self.before[node.value], into, count)

    def cuGraphNodeGetDependentNodes(self, node, into, count):
        self._list([each for each, before in self.before.items() if node.value in before], into, count)

    def cuGraphNodeGetType(self, node, kind):
        kind._obj.value = self.kinds[node.value]

    def cuGraphMemsetNodeGetParams(self, node, memset):
        for name, value in self.writes[node.value].items():
            setattr(memset._obj, name, value)

    def cuModuleLoadData(self, module, ptx):
        assert b".entry fill_for_memset(" in ptx

    def cuModuleGetFunction(self, function, module, name):
        assert name == b"fill_for_memset"
        function._obj.value = 7

    def cuGraphAddKernelNode(self, added, graph, before, count, kernel):
        kernel = kernel._obj
        assert kernel.function == 7 and len(before) == count.value
        assert [*kernel.grid] == [1, 1, 1] and 32 <= kernel.block[0] <= 1024 and [*kernel.block[1:]] == [1, 1]
        assert kernel.shared_bytes == 0
        kinds = (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32)
        place, words, word = (kind.from_address(kernel.parameters[i]).value for i, kind in enumerate(kinds))
        added._obj.value = self.add(KERNEL, tuple(before), place=place, words=words, word=word)

    def cuGraphAddDependencies(self, graph, first, then, count):
        assert len(first) == len(then) == count.value
        for one, other in zip(first, then, strict=True):
            self.before[other].append(one)

    def cuGraphDestroyNode(self, node):
        for before in (self.kinds, self.writes, self.before):
            del before[node.value]
        for before in self.before.values():
            before[:] = [each for each in before if each != node.value]


def memset(size: int = 16, **others: int) -> dict[str, int]:
    return {"place": 4096, "element_size": 1, "width": size, "height": 1, **others}


class TestGraphMemsets(unittest.TestCase):
    def replaced(self, driver: Driver) -> int:
        graph_memsets._fill.cache_clear()
        self.addCleanup(graph_memsets._fill.cache_clear)
        with mock.patch.object(graph_memsets, "call", driver.call):
            return become_kernels(5, 0)

    def test_a_kernel_comes_in_its_place(self):
        driver = Driver()
        first, other = driver.add(KERNEL), driver.add(KERNEL)
        cleared = driver.add(MEMSET, (first, other), **memset())
        last = [driver.add(KERNEL, (cleared,)), driver.add(KERNEL, (other, cleared))]
        alone = driver.add(MEMSET, **memset())
        assert self.replaced(driver) == 2
        assert MEMSET not in driver.kinds.values() and alone not in driver.kinds
        kernels = [node for node, writes in driver.writes.items() if writes]
        assert [driver.writes[node] for node in kernels] == [{"place": 4096, "words": 4, "word": 0}] * 2
        assert [driver.before[node] for node in kernels] == [[first, other], []]
        assert [driver.before[node] for node in last] == [[kernels[0]], [other, kernels[0]]]

    @parameterized.expand(
        [
            ("bytes", {"size": 8, "value": 0xAB}, 2, 0xABABABAB),
            ("halves", {"size": 6, "element_size": 2, "value": 0xABCD}, 3, 0xABCDABCD),
            ("words", {"size": 3, "element_size": 4, "value": 0x12345678}, 3, 0x12345678),
            ("the longest", {"size": LONGEST}, LONGEST // 4, 0),
        ]
    )
    def test_what_it_writes(self, _, writes, words, word):
        driver = Driver()
        driver.add(MEMSET, **memset(**writes))
        assert self.replaced(driver) == 1
        assert list(driver.writes.values()) == [{"place": 4096, "words": words, "word": word}]

    @parameterized.expand(
        [
            ("longer", {"size": LONGEST + 4}),
            ("not whole words", {"size": 6}),
            ("not where words begin", {"place": 4098}),
            ("rows", {"height": 2, "pitch": 64}),
        ]
    )
    def test_what_stays_a_memset(self, _, writes):
        driver = Driver()
        node = driver.add(MEMSET, **memset(**writes))
        assert self.replaced(driver) == 0
        assert driver.kinds == {node: MEMSET}

    def test_one_after_the_other(self):
        driver = Driver()
        first = driver.add(MEMSET, **memset())
        second = driver.add(MEMSET, (first,), **memset(place=8192))
        last = driver.add(KERNEL, (second,))
        assert self.replaced(driver) == 2
        one, other = (node for node, writes in driver.writes.items() if writes)
        assert driver.before == {last: [other], one: [], other: [one]}

    def test_what_cuda_calls_so(self):
        """Sizes and offsets as in cuda.h."""
        for structure, size, names in (
            (graph_memsets._Memset, 40, {"value": 16, "element_size": 20, "width": 24, "height": 32}),
            (graph_memsets._Kernel, 56, {"grid": 8, "block": 20, "shared_bytes": 32, "parameters": 40, "extra": 48}),
        ):
            assert ctypes.sizeof(structure) == size
            assert {name: getattr(structure, name).offset for name in names} == names

    def test_each_device_has_its_kernel(self):
        driver = Driver()
        with mock.patch.object(graph_memsets, "call", mock.Mock(side_effect=driver.call)) as asked:
            self.addCleanup(graph_memsets._fill.cache_clear)
            graph_memsets._fill.cache_clear()
            for device in (0, 1, 1):
                driver.add(MEMSET, **memset())
                assert become_kernels(5, device) == 1
        assert [each.args[0] for each in asked.call_args_list].count("cuModuleLoadData") == 2

    @parameterized.expand([("cuModuleLoadData",), ("cuGraphAddKernelNode",), ("cuGraphAddDependencies",)])
    def test_a_driver_that_refuses_leaves_the_graph_as_it_was(self, function):
        driver = Driver(function)
        cleared = driver.add(MEMSET, **memset())
        last = driver.add(KERNEL, (cleared,))
        with self.assertLogs(graph_memsets.logger, "INFO") as logs:
            assert self.replaced(driver) == 0
        assert "0 memsets" in logs.output[0] and function in logs.output[0]
        assert driver.kinds == {cleared: MEMSET, last: KERNEL} and driver.before[last] == [cleared]

    def test_a_memset_that_stays_beside_its_kernel_is_waited_for_too(self):
        driver = Driver("cuGraphDestroyNode")
        cleared = driver.add(MEMSET, **memset())
        last = driver.add(KERNEL, (cleared,))
        assert self.replaced(driver) == 0
        assert len(driver.before[last]) == 2 and len(driver.kinds) == 3

    def test_a_kernel_that_nothing_waits_for_fails_the_step(self):
        driver = Driver("cuGraphDestroyNode", "cuGraphAddDependencies")
        driver.add(KERNEL, (driver.add(MEMSET, **memset()),))
        with pytest.raises(AssertionError, match="nothing waits for"):
            self.replaced(driver)

    @parameterized.expand([("no such function", "libm.so.6"), ("no driver", "no_such_library.so")])
    def test_without_a_driver(self, _, library):
        with mock.patch.object(cuda_driver, "_driver", lambda: ctypes.CDLL(library)):
            assert become_kernels(5, 0) == 0

    def test_what_the_driver_answers(self):
        with mock.patch.object(cuda_driver, "_driver", lambda: mock.Mock(cuInit=lambda flags: flags)):
            cuda_driver.call("cuInit", 0)
            with pytest.raises(RuntimeError, match="cuInit of CUDA's driver answers 3"):
                cuda_driver.call("cuInit", 3)

    @parameterized.expand([("H200", 9, True, 1), ("H200, no copies", 9, False, 0), ("another", 8, True, 0)])
    def test_a_step_is_recorded_so(self, _, major, by_copies, wanted):
        graph, asked, capturing = mock.MagicMock(), [], mock.MagicMock()

        def step() -> int:
            current_call().by_copies = by_copies
            return 3

        def become(*args: Any) -> int:
            asked.append(args)
            assert capturing.__exit__.called and not graph.instantiate.called
            return 0

        with (
            mock.patch.multiple(torch.cuda, device=mock.MagicMock(), current_device=lambda: 1),
            mock.patch.object(torch.cuda, "graph", return_value=capturing),
            mock.patch.object(torch.cuda, "CUDAGraph", return_value=graph) as made,
            mock.patch.object(torch.cuda, "get_device_capability", lambda _: (major, 0)),
            mock.patch.object(graph_memsets, "become_kernels", become),
            call_of_a_graph(captured=True),
        ):
            replay, answer, _ = record(step, torch.device("cuda", 1), None)
        assert (replay, answer) == (graph.replay, 3)
        assert made.call_args == mock.call(keep_graph=major == 9)
        assert graph.instantiate.call_count == int(major == 9)
        assert asked == [(graph.raw_cuda_graph(), 1)] * wanted

    @require_torch_accelerator
    def test_on_a_gpu_what_is_cleared_is_what_the_next_kernel_reads(self):
        device = torch.device("cuda", torch.cuda.current_device())
        x = torch.zeros(5, LONGEST, dtype=torch.uint8, device=device)
        side = torch.cuda.Stream(device)

        def call() -> torch.Tensor:
            here = torch.cuda.current_stream(device)
            x.fill_(9)
            for row, (count, stream) in enumerate(((12, here), (LONGEST, here), (5, here), (64, side))):
                stream.wait_stream(here)
                place, handle = ctypes.c_uint64(x[row].data_ptr()), ctypes.c_void_p(stream.cuda_stream)
                cuda_driver.call("cuMemsetD8Async", place, ctypes.c_ubyte(row), ctypes.c_size_t(count), handle)
            here.wait_stream(side)
            current_call().by_copies = True
            return x + 1

        counts, become = [], graph_memsets.become_kernels
        counted = mock.patch.object(graph_memsets, "become_kernels", lambda *args: counts.append(become(*args)))
        with counted, call_of_a_graph(captured=True):
            replay, answer, _ = record(call, device, None)
        wanted = torch.full_like(x, 10)
        for row, count in enumerate((12, LONGEST, 5, 64)):
            wanted[row, :count] = row + 1
        for _ in range(3):
            x.fill_(77)
            answer.zero_()
            replay()
            assert torch.equal(answer, wanted)
        assert counts == [3]  # five bytes are no whole words
