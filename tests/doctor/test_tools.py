"""Parsers of tools' outputs, on every format and on every piece of it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusers_rocm.doctor.tools import (
    Link,
    amd_smi_fields,
    amd_smi_topology,
    ibv_abi_mismatches,
    ibv_devices,
    nvidia_smi_topology,
    rocm_smi_topology,
)


FIXTURES = Path(__file__).parent / "fixtures"
TOPOLOGIES = {
    "amd_smi_topology_new.json": amd_smi_topology,
    "amd_smi_topology_old.json": amd_smi_topology,
    "amd_smi_topology_wrapped.json": amd_smi_topology,
    "rocm_smi_showtopo.txt": rocm_smi_topology,
    "nvidia_smi_topo_nvlink.txt": nvidia_smi_topology,
    "nvidia_smi_topo_pcie.txt": nvidia_smi_topology,
    "nvidia_smi_topo_2xh200.txt": nvidia_smi_topology,
}
LISTS = {
    "amd_smi_static.txt": amd_smi_fields,
    "amd_smi_metric.txt": amd_smi_fields,
    "ibv_devices.txt": ibv_devices,
    "ibv_devices_abi.txt": ibv_abi_mismatches,
}
PAIRS = {(i, j) for i in range(4) for j in range(4) if i != j}


def text_of(name: str) -> str:
    return (FIXTURES / name).read_text()


def parsed_or_refused(parser: Callable, text: str):
    """What the parser answers, or None where it says in one line why it cannot."""
    try:
        return parser(text)
    except ValueError as error:
        assert str(error) and "\n" not in str(error)
        return None


class TestTopology:
    @pytest.mark.parametrize("name", ["amd_smi_topology_new.json", "amd_smi_topology_wrapped.json"])
    def test_links_by_gpu(self, name):
        links = amd_smi_topology(text_of(name))
        assert links == dict.fromkeys(PAIRS, Link("xGMI", "XGMI", True, 1))

    def test_maps_by_gpu(self):
        links = amd_smi_topology(text_of("amd_smi_topology_old.json"))
        assert links == dict.fromkeys({(0, 1), (1, 0)}, Link("PCIe", "PCIE", False, 2))

    def test_entries_are_matched_by_their_number(self):
        """They come in any order, and a process may see only some of them."""
        entry = '{"gpu": 5, "links": [{"gpu": 2, "link_type": "PCIE", "link_status": "ENABLED", "num_hops": 2}]}'
        assert amd_smi_topology(f"[{entry}]") == {(5, 2): Link("PCIe", "PCIE", True, 2)}

    @pytest.mark.parametrize(
        "before", ["[WARNING] user is not in group render\n", "\x1b[33m[WARNING]\x1b[0m no\n", "WARNING: {}\n"]
    )
    def test_warnings_before_it(self, before):
        text = text_of("amd_smi_topology_new.json")
        assert amd_smi_topology(before + text) == amd_smi_topology(text)

    def test_a_list_that_is_empty_is_not_the_one(self):
        text = text_of("amd_smi_topology_new.json")
        assert amd_smi_topology(f'{{"errors": [], "topology": {text}}}') == amd_smi_topology(text)

    def test_a_link_of_no_type(self):
        links = amd_smi_topology(text_of("amd_smi_topology_new.json").replace("XGMI", "NOT_APPLICABLE", 1))
        assert [link for link in links.values() if link.kind == "unknown"] == [
            Link("unknown", "NOT_APPLICABLE", True, 1)
        ]

    def test_rocm_smi(self):
        links = rocm_smi_topology(text_of("rocm_smi_showtopo.txt"))
        assert links.keys() == PAIRS
        assert links[0, 1] == links[3, 2] == Link("xGMI", "XGMI", True, 1)
        assert links[1, 2] == links[3, 0] == Link("PCIe", "PCIE", True, 3)

    def test_nvidia_smi(self):
        nvlink = nvidia_smi_topology(text_of("nvidia_smi_topo_nvlink.txt"))
        assert nvlink == dict.fromkeys(PAIRS, Link("NVLink", "NV18"))  # network cards are not among them
        captured = nvidia_smi_topology(text_of("nvidia_smi_topo_2xh200.txt"))
        assert captured == dict.fromkeys({(0, 1), (1, 0)}, Link("NVLink", "NV18"))
        pcie = nvidia_smi_topology(text_of("nvidia_smi_topo_pcie.txt"))
        assert pcie[0, 1] == Link("PCIe", "PHB") and pcie[0, 2] == Link("PCIe", "SYS") and pcie.keys() == PAIRS

    @pytest.mark.parametrize(
        "text, message",
        [
            ("", "no JSON"),
            ("[]", "no list of GPUs"),
            ('{"gpus": 3}', "no list of GPUs"),
            ("[" * 100_000, "nested too deep"),
            ("[1, 2]", "lacks what was looked for"),
            ('[{"gpu": 0, "links": [{"gpu": 1}]}]', "lacks what was looked for: 'link_type'"),
            ('[{"gpu": 0, "link_type": {"gpu_1": "WARP"}}]', "'WARP' is no type of link"),
        ],
    )
    def test_what_is_no_topology(self, text, message):
        with pytest.raises(ValueError, match=message):
            amd_smi_topology(text)

    def test_says_where_it_is_cut(self):
        with pytest.raises(ValueError, match="the row of GPU1 has 1 of 2 columns: cut off"):
            nvidia_smi_topology("\tGPU0\tGPU1\nGPU0\t X \tSYS\nGPU1\tSYS")
        with pytest.raises(ValueError, match="1 of 2 rows: cut off"):
            nvidia_smi_topology("\tGPU0\tGPU1\nGPU0\t X \tSYS\n")

    @pytest.mark.parametrize("name", TOPOLOGIES)
    def test_cut_anywhere(self, name):
        """A piece says that it is one, or holds all that the whole holds: never fewer links, or other ones."""
        text, parser = text_of(name), TOPOLOGIES[name]
        whole, refused = parser(text), 0
        for end in range(len(text)):
            found = parsed_or_refused(parser, text[:end])
            refused += found is None
            assert found is None or found == whole, text[:end][-60:]
        assert refused > len(text) / 8

    @pytest.mark.parametrize("name", TOPOLOGIES)
    @settings(max_examples=60, deadline=None)
    @given(data=st.data())
    def test_garbled(self, name, data):
        """Something else in the middle of it, or lines that are lost."""
        text = text_of(name)
        begin = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(begin, min(len(text), begin + 200)))
        parsed_or_refused(TOPOLOGIES[name], text[:begin] + data.draw(st.text(max_size=20)) + text[end:])

    @settings(max_examples=60, deadline=None)
    @given(text=st.text(max_size=200))
    def test_anything(self, text):
        for parser in {*TOPOLOGIES.values(), *LISTS.values()}:
            parsed_or_refused(parser, text)

    @settings(max_examples=100, deadline=None)
    @given(
        content=st.recursive(
            st.none() | st.integers() | st.text(max_size=5) | st.floats(),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["gpu", "links", "link_type", "link_status", "num_hops", "hops", "gpu_0"]), inner
                )
            ),
            max_leaves=12,
        )
    )
    def test_any_json(self, content):
        import json

        parsed_or_refused(amd_smi_topology, json.dumps(content))


class TestLists:
    def test_fields(self):
        static, metric = amd_smi_fields(text_of("amd_smi_static.txt")), amd_smi_fields(text_of("amd_smi_metric.txt"))
        assert [static[gpu]["TARGET_GRAPHICS_VERSION"] for gpu in (0, 1)] == ["gfx1100"] * 2
        assert static[1]["MAX_PCIE_WIDTH"] == "16" and static[1]["MAX_PCIE_SPEED"] == "16 GT/s"
        assert [metric[gpu]["WIDTH"] for gpu in (0, 1)] == ["16", "4"] and metric[0]["SPEED"] == "16 GT/s"

    def test_ibv_devices(self):
        assert ibv_devices(text_of("ibv_devices.txt")) == ["mlx5_0", "mlx5_1"]
        assert ibv_devices(text_of("ibv_devices_abi.txt")) == []
        assert ibv_abi_mismatches(text_of("ibv_devices.txt")) == []
        assert ibv_abi_mismatches(text_of("ibv_devices_abi.txt")) == ["bnxt_re: kernel ABI 6, library 1 to 1"]

    @pytest.mark.parametrize("name", LISTS)
    def test_cut_anywhere(self, name):
        """A piece holds nothing that the whole does not hold."""
        text, parser = text_of(name), LISTS[name]
        whole = parser(text)
        for end in range(len(text)):
            found = parsed_or_refused(parser, text[:end])
            assert found is None or len(found) <= len(whole)
