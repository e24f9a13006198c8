"""Which links are slow is measured when a model is enabled, and known to its attention."""

import unittest
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist
from parameterized import parameterized

from diffusers_rocm import ParallelConfig
from diffusers_rocm.distributed import choices, links
from diffusers_rocm.distributed.axis import Axis
from diffusers_rocm.distributed.links import FAST, links_are_slow, reaches_memory
from diffusers_rocm.hooks.context_parallel import split_of

from ..models.transformers.test_models_transformer_flux import FluxTransformerTesterConfig
from ..testing_utils import run_ranks


def enabled_worker(degrees: dict[str, int]) -> tuple[bool, bool, bool]:
    model, config = FluxTransformerTesterConfig().get_model(), ParallelConfig(**degrees)
    model.enable_parallelism(config=config)
    axes = model.parallelism.axes
    return axes.ulysses.slow_links, split_of(model).layout_of(24).ulysses.slow_links, axes == config.axes()


def uneven_worker(degrees: dict[str, int], known: tuple[bool, bool]) -> tuple[bool, set[tuple[int, bool]], bool]:
    """What is known of links, and of GPUs, where those of one rank are less than those of the other."""
    model, config = FluxTransformerTesterConfig().get_model(), ParallelConfig(**degrees)
    rank = Axis.of_all().rank
    own = {
        "_rate": lambda _: (300e9, 50e9)[rank],
        "multiprocessors": lambda _: (96, 60)[rank],
        "is_known": lambda _: known[rank],
    }
    with mock.patch.multiple(links, **own):
        slow = links_are_slow(Axis.of_all())
        model.enable_parallelism(config=config)
    axes, split = model.parallelism.axes, split_of(model)
    layout = split.layout_of(24) if split else axes
    sending = (axes.tp, axes.ring, axes.ulysses, layout.ring, layout.ulysses)
    return slow, {(axis.multiprocessors, axis.known_gpus) for axis in sending}, axes == config.axes()


def slow_copies_worker() -> list[bool]:
    """What is answered where copies are as fast on both ranks, and where they are not on the second."""
    answers = []
    for second in (30, 10):
        rates = iter([int(25e9), int((30, second)[Axis.of_all().rank] * 1e9)])
        with mock.patch.object(links, "_timed", lambda *_, rates=rates: next(rates)):
            answers.append(links._is_fast(Axis.of_all(), mock.Mock()))
    return answers


def measured_worker() -> tuple[tuple[bool, bool], tuple[bool, bool]]:
    """What is answered, and whether the fastest of many messages is slow (others may use the machine meanwhile), and
    whether there is a way from GPU to GPU."""
    axis = Axis.of_all()
    module = torch.get_device_module(axis.device)
    message, received = torch.zeros(2, 1 << 27, dtype=torch.uint8, device=axis.device)
    times = []
    for _ in range(20):
        begin, end = (module.Event(enable_timing=True) for _ in range(2))
        begin.record()
        dist.all_to_all_single(received, message)
        end.record()
        module.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    rate = message.numel() * (axis.size - 1) / axis.size / min(times)
    peers = [torch.cuda.can_device_access_peer(axis.rank, other) for other in range(axis.size) if other != axis.rank]
    return (links_are_slow(axis), reaches_memory(axis)), (rate < FAST, all(peers))


class TestLinks(unittest.TestCase):
    @parameterized.expand([({"ulysses": 2}, True), ({"ulysses": 2, "ring": 2}, True), ({"ring": 2}, False)])
    def test_attention_knows(self, degrees, slow):
        for found in run_ranks(2 * len(degrees), enabled_worker, degrees):
            assert found == (slow, slow, True)  # by which a model that was loaded is known to be on this mesh

    @parameterized.expand(
        [
            ({"ring": 2}, (True, True)),
            ({"ulysses": 2}, (True, False)),
            ({"tp": 2}, (False, True)),
            ({"tp": 2}, (True,) * 2),
        ]
    )
    def test_all_ranks_know_the_same(self, degrees, known):
        """Of two cards: what one of them cut, or held, the other would wait for."""
        assert run_ranks(2, uneven_worker, degrees, known) == [(True, {(60, all(known))}, True)] * 2

    def test_one_rank_has_none(self):
        assert not links_are_slow(Axis.single("ulysses"))
        assert not reaches_memory(Axis.single("ulysses"))

    @parameterized.expand(
        [
            ("ulysses", 2, 50e9, "beside what is computed, by a gather"),
            ("ulysses", 4, 50e9, "beside what is computed"),
            ("ring", 2, 50e9, "beside what is computed"),
            ("ulysses", 2, 300e9, "by themselves"),
            ("tp", 2, 50e9, "by themselves"),
            ("ulysses", 2, 0, "beside what is computed"),  # a CPU's
        ]
    )
    def test_what_is_said(self, name, size, rate, said):
        found = {"_rate": lambda _: int(rate), "all_gather_int64": lambda own, axis: own}
        with mock.patch.multiple(links, **found), self.assertLogs(links.logger, "INFO") as logs:
            device = torch.device("cuda" if rate else "cpu")
            links_are_slow(replace(Axis.single(name), size=size, device=device, known_gpus=True))
        assert logs.output[0].endswith(f": they go {said}"), logs.output

    def test_gpus_that_were_not_measured(self):
        """Nothing that is about how GPUs begin what they are given is chosen for kinds that were not measured."""
        chosen = (choices.begins_early, choices.goes_by_gather, lambda axis: choices.goes_in_halves(24, axis))
        whatever_kind = (choices.computes_beside, choices.goes_in_groups)
        with mock.patch.object(torch.compiler, "is_compiling", lambda: True):
            for known in (True, False):
                axis = replace(Axis.single("ulysses"), size=2, device=torch.device("cuda"), known_gpus=known)
                slow = replace(axis, slow_links=True)
                assert [choose(slow) for choose in chosen] == [known] * 3
                assert all(choose(slow) for choose in whatever_kind)
                assert not any(choose(axis) for choose in (*chosen, *whatever_kind))  # it costs more than it hides

    @parameterized.expand(
        [
            ("cuda", (9, 0), None, True),
            ("cuda", (8, 9), None, False),
            ("cuda", (10, 0), None, False),
            ("cuda", (9, 4), "6.4", False),  # an MI300X
            ("cuda", (9, 0), "6.4", False),  # a gfx900
            ("xpu", (9, 0), None, False),
            ("cpu", (9, 0), None, True),
        ]
    )
    def test_which_were_measured(self, kind, capability, hip, wanted):
        of_kind = mock.patch.object(torch.cuda, "get_device_capability", lambda _: capability)
        with of_kind, mock.patch.object(torch.version, "hip", hip):
            assert choices.is_known(torch.device(kind)) == choices.memsets_become_kernels(torch.device(kind)) == wanted

    def test_whose_memory_may_be_copied(self):
        axis = replace(Axis.single("ulysses"), size=2, device=torch.device("cuda"))
        for hip, wanted in ((None, True), ("6.4", False)):
            with mock.patch.object(torch.version, "hip", hip):
                assert links._may_copy(axis) == wanted

    def test_what_may_go_by_copies(self):
        axis = replace(Axis.single("ring"), size=2, known_gpus=True)
        ways = {"exact": {}, "slow": {"slow_links": True}, "8 bits": {"communication": "int8"}}
        ways["not measured"] = {"known_gpus": False}
        found = {name: choices.goes_by_copies(replace(axis, **way)) for name, way in ways.items()}
        assert found == {**dict.fromkeys(ways, False), "exact": True}, found

    def test_where_gelu_is_in_products(self):
        axis, tp = replace(Axis.single("ring"), size=2, known_gpus=True), Axis.single("tp")
        assert choices.gelu_is_in_products(tp, axis, axis)
        assert not choices.gelu_is_in_products(replace(tp, size=2), axis, axis)
        for way in ({"slow_links": True}, {"known_gpus": False}):
            assert not choices.gelu_is_in_products(tp, axis, replace(axis, **way))

    @parameterized.expand([(25, 33, True), (25, 21, True), (25, 19, False), (240, 33, False)])
    def test_what_the_host_is_taken_for(self, by_group, by_copies, wanted):
        """Copies may be slower than the process group by a fifth."""
        rates, memory = iter([int(by_group * 1e9), int(by_copies * 1e9)]), mock.Mock()
        with mock.patch.object(links, "_timed", lambda *_: next(rates)):
            assert links._is_fast(Axis.single("ulysses"), memory) == wanted
        memory.captured.side_effect = RuntimeError("no memory")
        assert not links._is_fast(Axis.single("ulysses"), memory)

    def test_the_slowest_rank_says_how_fast_copies_are(self):
        assert run_ranks(2, slow_copies_worker) == [[True, False]] * 2

    def test_whose_memory_is_reached(self):
        """That of NVIDIA's GPUs of one host, of which no two ranks have the same, and each reaches the others."""

        def reached(hip=None, hosts=("a 1", "a 1"), devices=(0, 1), peers=True, trial=True) -> bool:
            axis = replace(Axis.single("ulysses"), size=2, device=torch.device("cuda", 0))
            found = {
                "all_gather_text": lambda text, axis: list(hosts),
                "all_gather_int64": lambda own, axis: torch.tensor([[each] for each in devices]),
                "on_all_ranks": lambda own, axis: own,
                "can_fetch": lambda *_: trial,
            }
            with mock.patch.multiple(links, **found), mock.patch.object(torch.version, "hip", hip):
                with mock.patch.object(torch.cuda, "can_device_access_peer", lambda *_: peers):
                    return reaches_memory(axis)

        assert reached()
        assert not any((reached(hip="6.4"), reached(hosts=("a 1", "b 2")), reached(hosts=("a 1", "a 2"))))
        assert not any((reached(peers=False), reached(trial=False)))
        with self.assertLogs(links.logger, "INFO") as logs:
            assert not reached(devices=(0, 0))
        assert logs.output[0].endswith(": ranks see one GPU each, as by CUDA_VISIBLE_DEVICES; let all see all")

    @unittest.skipIf(torch.cuda.device_count() < 2, "needs 2 GPUs")
    def test_gpus(self):
        for ours, theirs in run_ranks(2, measured_worker, device="cuda"):
            assert ours == theirs


if __name__ == "__main__":
    unittest.main()
