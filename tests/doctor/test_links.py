"""Static checks of what lies between cards: PCI and topology, each one both ways."""

from pathlib import Path

import pytest

from diffusers_rocm.doctor import cards
from diffusers_rocm.doctor.finding import OK, SKIPPED, WARNING, Finding
from diffusers_rocm.doctor.machine import run_tool

from .machines import BUS, machine, pci_card, radeons


FIXTURES = Path(__file__).parent / "fixtures"
KFD = "/sys/class/kfd/kfd/topology/nodes"
TWO = ("gfx1100", "gfx1100")


class TestPci:
    def test_small_window(self, tmp_path):
        small = "0x00000000e0000000 0x00000000efffffff 0x000000000014220c"
        files = radeons("gfx1100") | {f"{BUS}/0000:03:00.0/resource": small}
        found = cards.large_bar(machine(tmp_path, files))
        assert found.status == WARNING and "0.25 of 24 GiB" in found.seen and "0000:03:00.0" in found.fix

    @pytest.mark.parametrize("gibibytes, driver", [(0.5, True), (8, True), (0.5, False)])
    def test_window_of_the_gpu_of_the_cpu(self, tmp_path, gibibytes, driver):
        """Is small, and of no card: that it is no card, the compute driver says or its memory."""
        own = pci_card(
            "0000:43:00.0",
            mem_info_vram_total=str(int(gibibytes * 2**30)),
            resource="0x00000000e0000000 0x00000000efffffff 0x000000000014220c",
        )
        files = radeons(*TWO, "gfx1036") | own | ({} if driver else {f"{KFD}/3/properties": None})
        found = cards.large_bar(machine(tmp_path, files, environment={"HIP_VISIBLE_DEVICES": "0,1"}))
        assert found.status == OK and found.seen == "host and peers see 32 of 24 GiB, 32 of 24 GiB"

    @pytest.mark.parametrize("content", ["", "0x1", "x y z"])
    def test_unreadable_window(self, tmp_path, content):
        files = radeons("gfx1100") | {f"{BUS}/0000:03:00.0/resource": content}
        assert cards.large_bar(machine(tmp_path, files)).status == SKIPPED

    def test_fewer_lanes(self, tmp_path):
        files = radeons(*TWO) | {f"{BUS}/0000:23:00.0/current_link_width": "4"}
        found = cards.pcie_link(machine(tmp_path, files))
        assert found.status == WARNING and "0000:23:00.0 has x4 of x16" in found.seen

    def test_slower(self, tmp_path):
        files = radeons(*TWO) | {f"{BUS}/0000:03:00.0/current_link_speed": "2.5 GT/s PCIe"}
        found = cards.pcie_link(machine(tmp_path, files))
        assert found.status == WARNING and "2.5 of 16 GT/s" in found.seen

    def behind_a_bridge(self, root: Path, width: str, speed: str, **card: str) -> Finding:
        """Of a card in a slot that has no more than this."""
        bridge = root / "sys/devices/pci0000:00/0000:00:01.1"
        given = machine(root, pci_card("0000:03:00.0", **card))
        bridge.mkdir(parents=True)
        for name, text in (("width", width), ("speed", f"{speed} GT/s PCIe")):
            (bridge / f"current_link_{name}").write_text(text)
            (bridge / f"max_link_{name}").write_text(text)
        folder = root / BUS.lstrip("/") / "0000:03:00.0"
        folder.rename(bridge / "0000:03:00.0")
        folder.symlink_to(bridge / "0000:03:00.0")
        return cards.pcie_link(given)

    def test_behind_a_narrow_bridge(self, tmp_path):
        """A card's own end is wide; the slot, of the chipset, is not."""
        found = self.behind_a_bridge(tmp_path, "4", "8.0")
        assert "x4 at 8 GT/s" in found.seen and found.status == WARNING

    def test_in_a_slot_of_an_older_generation(self, tmp_path):
        """The card has all that the slot has; idle it has less."""
        new = {"max_link_speed": "32.0 GT/s PCIe"}
        found = self.behind_a_bridge(tmp_path / "a", "16", "16.0", **new)
        assert found.status == OK and found.seen == "1 card(s) x16 at 16 GT/s, the most of 0000:00:01.1 before it"
        found = self.behind_a_bridge(tmp_path / "b", "16", "16.0", current_link_speed="2.5 GT/s PCIe", **new)
        assert found.status == WARNING and "has 2.5 of 16 GT/s" in found.seen and "the most of" not in found.seen

    def test_by_amd_smi(self, tmp_path):
        tools = {
            "amd-smi metric -P": (FIXTURES / "amd_smi_metric.txt").read_text(),
            "amd-smi static -b": (FIXTURES / "amd_smi_static.txt").read_text(),
        }
        found = cards.pcie_link(machine(tmp_path, {}, tools=tools))
        assert found.status == WARNING and "GPU 1 has x4 of x16" in found.seen and "GPU 0" not in found.seen
        assert cards.pcie_link(machine(tmp_path, {})).status == SKIPPED


class TestTopology:
    @pytest.mark.parametrize(
        "command, fixture, status, seen",
        [
            ("amd-smi topology --json", "amd_smi_topology_new.json", OK, "xGMI (XGMI): 6 pair(s)"),
            ("amd-smi topology --json", "amd_smi_topology_wrapped.json", OK, "xGMI (XGMI): 6 pair(s)"),
            ("amd-smi topology --json", "amd_smi_topology_old.json", WARNING, "0 to 1, 1 to 0"),
            (
                "rocm-smi --showtopo",
                "rocm_smi_showtopo.txt",
                WARNING,
                "PCIe (PCIE): 4 pair(s), xGMI (XGMI): 2 pair(s)",
            ),
            ("nvidia-smi topo -m", "nvidia_smi_topo_pcie.txt", OK, "PCIe (PHB): 2 pair(s), PCIe (SYS): 4 pair(s)"),
        ],
    )
    def test_formats(self, tmp_path, command, fixture, status, seen):
        given = machine(tmp_path, radeons(*TWO), tools={command: (FIXTURES / fixture).read_text()})
        found = cards.topology(given)
        assert found.status == status and seen in found.seen, found

    def test_the_next_tool_where_one_fails(self, tmp_path):
        tools = {
            "amd-smi topology --json": ValueError("amd-smi topology --json: exit code 1"),
            "rocm-smi --showtopo": (FIXTURES / "rocm_smi_showtopo.txt").read_text(),
        }
        assert "xGMI" in cards.topology(machine(tmp_path, radeons(*TWO), tools=tools)).seen

    @pytest.mark.parametrize("fixture", ["amd_smi_topology_new.json", "amd_smi_topology_old.json"])
    def test_half(self, tmp_path, fixture):
        text = (FIXTURES / fixture).read_text()
        tools = {"amd-smi topology --json": text[: len(text) // 2]}
        found = cards.topology(machine(tmp_path, radeons(*TWO), tools=tools))
        assert found.status == WARNING and "amd-smi topology --json: not JSON" in found.seen

    def test_real_tool(self):
        assert run_tool(("no-such-tool-anywhere",)) is None
        assert run_tool(("sh", "-c", "echo a; echo b >&2")) == "a\nb\n"
        with pytest.raises(ValueError, match="exit code 3: worse"):
            run_tool(("sh", "-c", "echo bad; echo worse >&2; exit 3"))
