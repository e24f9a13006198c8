"""What is predicted of meshes, and which of them are had."""

import importlib.util
import sys
import unittest
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
from parameterized import parameterized

from diffusers_rocm.pipelines.model_folder import EMBEDDED_MODEL
from diffusers_rocm.planner.cost import predict
from diffusers_rocm.planner.hardware import GPUS, Links, find_gpu
from diffusers_rocm.planner.rehearsal import Exchange, Ledger, Work
from diffusers_rocm.planner.search import RESERVED, Machine, search
from diffusers_rocm.planner.stages import encoder_bytes
from diffusers_rocm.planner.subject import SUBJECTS, find_subject

from ..testing_utils import in_process, message_of, slow


UTILS = Path(__file__).parents[2] / "utils"
H200, FAST, SLOW = GPUS["H200"], Links(310e9, 50e9), Links(12e9, 12e9)


def machine(gpus: int, nodes: int = 1, memory: float = 141e9, links: Links = FAST) -> Machine:
    return Machine(H200, gpus, nodes, memory, links)


def seconds_of(exchange: Exchange, degrees: dict[str, int], links: Links, per_node: int = 8):
    ledger = Ledger()
    ledger.exchanges[exchange] = 10
    return predict(ledger, degrees, H200, links, per_node)


def script(name: str) -> ModuleType:
    """One of utils/."""
    spec = importlib.util.spec_from_file_location(name, UTILS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestCost(unittest.TestCase):
    def test_what_was_measured(self):
        """Every row within a fifth, and no mesh chosen that was much slower than the best: also of slow links."""
        files = ("step_flux_graphs_4xh100", "step_flux_65k_4xh200_p2p_off", "step_wan_2xh200_p2p_off")
        check = script("check_planner")
        with mock.patch.object(sys, "argv", ["check_planner", "--files", *files]):
            result = in_process(check.main)
        assert result.returncode == 0 and "15 rows" in result.stdout, result.stdout + result.stderr

    def test_exchanges_cross_the_slowest_link(self):
        links, size = Links(100e9, 10e9, latency=0), 1 << 30
        within = seconds_of(Exchange("all-reduce", "tp", size, False), {"tp": 8}, links)
        assert abs(within.communication["tp"] / (10 * 2 * 7 / 8 * size / 100e9) - 1) < 1e-9
        beyond = seconds_of(Exchange("all-reduce", "tp", size, False), {"tp": 8}, links, per_node=4)
        assert abs(beyond.communication["tp"] / within.communication["tp"] - 10) < 1e-9
        # tp takes the neighbours of the node; each ulysses rank is on a node of its own.
        both = {"ulysses": 2, "tp": 4}
        apart = seconds_of(Exchange("all-to-all", "ulysses", size, False), both, links, per_node=4)
        assert abs(apart.communication["ulysses"] / (10 * size / 10e9) - 1) < 1e-9
        # Of an exchange with seven others, four are on the other node.
        mixed = seconds_of(Exchange("all-to-all", "ulysses", size, False), {"ulysses": 8}, links, per_node=4)
        assert abs(mixed.communication["ulysses"] / (10 * size * 4 / 7 / 10e9) - 1) < 1e-9

    def test_hops_hide_under_attention(self):
        ledger, links = Ledger(), Links(12e9, 12e9, latency=0)
        hop = Exchange("all-to-all", "ring", 12 * 10**6, True)  # a millisecond
        ledger.exchanges[hop] = 3
        alone = predict(ledger, {"ring": 4}, H200, links, 8)
        assert abs(alone.communication["ring"] - 3e-3) < 1e-9 and alone.hidden == 0
        ledger.work[Work("attention", int(H200.attention * 2e-3), 0, 0)] = 1
        beside = predict(ledger, {"ring": 4}, H200, links, 8)
        assert abs(beside.hidden - 1.5e-3) < 1e-8 and abs(beside.communication["ring"] - 1.5e-3) < 1e-8

    def test_few_tiles_leave_units_idle(self):
        def matmul(rows: int) -> float:
            ledger = Ledger()
            ledger.work[Work("matmul", 2 * rows * 4096**2, 0, 0, (rows, 4096, 4096))] = 1
            return predict(ledger, {}, H200, SLOW, 8).matmul

        # 16 and 256 tiles for 132 units.
        assert matmul(128) * 8 > 1.5 * matmul(1024)


class TestSearch(unittest.TestCase):
    def test_memory_decides(self):
        flux = replace(find_subject("black-forest-labs/FLUX.1-dev"), encoders={}, vae=None)
        found, dropped = search(flux, flux.size, machine(2, memory=16e9, links=SLOW), "bfloat16")
        assert [str(each) for each in found] == ["tp=2"]
        assert {each.mesh for each in dropped} == {"ulysses=2", "ring=2 (p2p)"}
        assert all("GB to denoise, 15.0 are free" in each.reason and each.short_of > 8e9 for each in dropped)
        found, dropped = search(flux, flux.size, machine(2, memory=16e9, links=SLOW), "int8")
        assert len(found) == 3 and not dropped

    def test_a_ring_has_two_rows_where_it_has_two_ways(self):
        """Short sequences are gathered by either rotate method."""
        flux = replace(find_subject("flux"), config={"num_layers": 1, "num_single_layers": 1}, encoders={}, vae=None)

        def ring(degrees):
            return degrees == {"ring": 2}

        for resolution, rows in ((256, ["ring=2 (p2p)"]), (2048, ["ring=2 (allgather)", "ring=2 (p2p)"])):
            size = flux.known.sized(resolution, None, None)
            for memory in (141e9, 1.1e9):
                found, dropped = search(flux, size, machine(2, memory=memory, links=SLOW), "bfloat16", wanted=ring)
                assert sorted([*map(str, found), *(each.mesh for each in dropped)]) == rows, (found, dropped)
                assert bool(found) == (memory > 2e9)

    def test_advice_is_of_weights_where_they_are_enough(self):
        flux = replace(find_subject("flux"), encoders={}, vae=None)
        for memory, text, dtype, said in (
            (16e9, 512, "bfloat16", "--dtype int8, or generate's --offload group"),
            (8e9, 512, "bfloat16", "more GPUs, or generate's --offload group"),
            (8e9, 512, "int8", "more GPUs, or generate's --offload group"),
            (16e9, 500000, "bfloat16", "a smaller --resolution, fewer --frames, less --text, or more GPUs"),
        ):
            size = flux.known.sized(None, None, text)
            given = machine(2, memory=memory), dtype
            _, dropped = search(flux, size, *given, wanted=lambda degrees: degrees == {"ulysses": 2})
            assert [each.way_out for each in dropped] == [said], dropped

    def test_slow_links_are_for_guidance(self):
        wan = replace(find_subject("wan"), config={"num_layers": 2}, encoders={}, vae=None)
        guided, _ = search(wan, wan.known.sized(None, 9, None), machine(2, links=SLOW), "bfloat16")
        assert [str(each) for each in guided][0] == "cfg=2" and guided[-1].degrees == {"tp": 2}
        assert guided[0].forwards == 1 and guided[1].forwards == 2

    @parameterized.expand([("hunyuan-video", 24), ("wan", 40)])
    def test_ulysses_alone_ends_with_the_heads(self, name, heads):
        """Known of both: on nodes of 8 GPUs Ulysses alone goes as far as 3 and 5 nodes."""
        layers = {"num_layers": 2, "num_single_layers": 2} if name == "hunyuan-video" else {"num_layers": 2}
        subject = replace(find_subject(name), config=layers, encoders={}, vae=None)
        tiny = subject.known.sized(160, 5, 64)

        def alone(degrees):
            return degrees.keys() == {"ulysses"}

        nodes = heads // 8
        found, dropped = search(subject, tiny, machine(8, nodes), "bfloat16", wanted=alone)
        assert [each.degrees for each in found] == [{"ulysses": heads}] and not dropped
        found, dropped = search(subject, tiny, machine(8, nodes + 1), "bfloat16", wanted=alone)
        assert not found and f"{heads + 8} ranks needs as many heads" in dropped[0].reason
        beyond, _ = search(
            subject,
            tiny,
            machine(8, nodes + 1),
            "bfloat16",
            wanted=lambda degrees: degrees.get("ulysses") == 8 and degrees.keys() <= {"ring", "ulysses"},
        )
        assert beyond and all(each.degrees["ring"] == nodes + 1 for each in beyond)

    @slow
    def test_the_page_of_many_nodes(self):
        """Its row of 5 nodes is that of the best mesh of all."""
        make = script("make_scaling")
        row = make.row("wan", 40, 5)
        assert "cfg=2,ring=2,ulysses=10" in row and f"\n{row}\n" in make.PAGE.read_text(), row

    def test_encoders_are_cut(self):
        part = SUBJECTS["flux"].encoders["text_encoder_2"]
        whole, quarter = encoder_bytes(part, 4, torch.bfloat16)
        assert 9.4e9 < whole < 9.7e9 and whole / 4 < quarter < whole / 4 + 0.3e9

    def test_a_pipeline_in_a_folder(self):
        tiny = find_subject(str(EMBEDDED_MODEL))
        found, _ = search(tiny, tiny.known.sized(64, None, 32), machine(2), "float32")
        assert {str(each) for each in found} >= {"tp=2", "ulysses=2", "ring=2 (p2p)"}
        assert max(each.stages["denoise"] for each in found) < 50e6 < RESERVED

    def test_gpus_by_name(self):
        assert find_gpu("7800 xt").name == find_gpu("rx7800xt").name == "RX 7800 XT"
        assert find_gpu("7900 XTX").name == "RX 7900 XTX" and find_gpu("MI300X").units == 304
        with mock.patch("torch.cuda.is_available", return_value=True):
            with mock.patch("torch.cuda.get_device_name", return_value="AMD Radeon RX 7900 XT"):
                assert find_gpu(None).name == "RX 7900 XT"
            with mock.patch("torch.cuda.get_device_name", return_value="NVIDIA T4"):
                assert "what NVIDIA T4 reaches is not known: measure it" in message_of(find_gpu, None)
        for name, said in (("7900", "which of RX 7900 XTX, RX 7900 XT"), ("Voodoo", "unknown"), ("", "unknown")):
            with self.assertRaisesRegex(ValueError, said):
                find_gpu(name)


if __name__ == "__main__":
    unittest.main()
