"""Static checks on machines that are folders: each one both ways."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusers_rocm.distributed.environment import unset
from diffusers_rocm.doctor import cards, host
from diffusers_rocm.doctor.finding import OK, PROBLEM, SKIPPED, STATUSES, WARNING, Finding, exit_code
from diffusers_rocm.doctor.machine import Machine, TorchBuild, gfx_name
from diffusers_rocm.doctor.static import CHECKS, static_checks

from .machines import BUS, CPU, CUDA, GOOD_SETTINGS, ROCM, all_of, kfd_node, machine, pci_card, radeons, rdma_device


FIXTURES = Path(__file__).parent / "fixtures"
TOPOLOGY = {"amd-smi topology --json": (FIXTURES / "amd_smi_topology_new.json").read_text()}
TWO = ("gfx1100", "gfx1100")


class TestWhole:
    def test_healthy_radeons(self, tmp_path):
        found = all_of(machine(tmp_path, radeons(*TWO), tools=TOPOLOGY))
        assert exit_code(found.values()) == 0
        assert {each.status for each in found.values()} == {OK, SKIPPED}, found
        for name in ("torch build", "permissions", "integrated gpu", "architecture", "aotriton", "miopen find mode"):
            assert found[name].status == OK, found[name]
        for name in ("large bar", "iommu", "numa balancing", "pcie link", "topology", "shared memory"):
            assert found[name].status == OK, found[name]
        assert found["rdma devices"] == Finding(SKIPPED, "no RDMA device", name="rdma devices")

    def test_laptop(self, tmp_path):
        found = all_of(machine(tmp_path, {"/proc/cmdline": "quiet"}, CPU, {}))
        assert [name for name, each in found.items() if each.status != SKIPPED] == ["torch build"]
        assert found["torch build"].status == OK

    def test_nothing_readable(self, tmp_path):
        """Not Linux, say."""
        assert exit_code(static_checks(machine(tmp_path, {}, CPU, {}))) == 0

    def test_cuda(self, tmp_path):
        files = pci_card("0000:03:00.0", "0x10de") | pci_card("0000:04:00.0", "0x10de") | {"/dev/shm/nothing": ""}
        tools = {"nvidia-smi topo -m": (FIXTURES / "nvidia_smi_topo_nvlink.txt").read_text()}
        found = all_of(machine(tmp_path, files, CUDA, {}, tools))
        assert found["topology"].seen == "NVLink (NV18): 6 pair(s)"
        assert found["aotriton"].seen == "no AMD GPU" and exit_code(found.values()) == 0

    def test_a_check_that_fails_is_told_of(self, tmp_path):
        files = radeons(*TWO) | rdma_device("mlx5_0") | {"/dev/infiniband/uverbs0": ""}
        found = all_of(machine(tmp_path, files, tools=TOPOLOGY | {"ibv_devices": "what?"}))
        assert found["rdma library"].status == WARNING and "no table of devices" in found["rdma library"].seen
        assert found["values"].status == SKIPPED or found["values"].status == OK  # the others go on

    def test_names_are_those_of_the_documentation(self):
        text = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
        for _, _, checks in CHECKS:
            for check in checks:
                assert f"| {check.__name__.replace('_', ' ')} |" in text, check

    @settings(max_examples=30, deadline=None)
    @given(data=st.data())
    def test_any_content(self, data):
        """Whatever is in the files and variables, there is a finding of every check."""
        files = dict(radeons("gfx1100", "gfx1036") | rdma_device("mlx5_0", gids=["fe80::1"]))
        for name in data.draw(st.lists(st.sampled_from(sorted(files)), max_size=12)):
            files[name] = data.draw(st.text(max_size=30))
        words = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)
        names = ["HIP_VISIBLE_DEVICES", "HSA_OVERRIDE_GFX_VERSION", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"]
        names += ["NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_TOPO_FILE", "NCCL_DEBUG", "MIOPEN_FIND_MODE"]
        names += ["NCCL_ALGO", "NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"]
        environment = data.draw(st.dictionaries(st.sampled_from(names), words))
        printed = data.draw(st.text(max_size=60))
        tools = dict.fromkeys(("amd-smi topology --json", "ibv_devices", "amd-smi static"), printed)
        with tempfile.TemporaryDirectory() as folder:
            found = [*static_checks(machine(Path(folder), files, ROCM, environment, tools))]
        assert len(found) == sum(len(checks) for _, _, checks in CHECKS)
        assert all(each.status in STATUSES and "\n" not in each.fix for each in found)


class TestTorchBuild:
    @pytest.mark.parametrize(
        "torch, vendor, status",
        [
            (ROCM, "0x1002", OK),
            (CUDA, "0x1002", OK),  # for NVIDIA cards that are there too
            (TorchBuild("2.11.0", cuda="13.0"), "0x1002", PROBLEM),
            (CPU, "0x1002", PROBLEM),
            (CUDA, "0x10de", OK),
            (CPU, "0x10de", PROBLEM),
            (CPU, "0x8086", OK),
            (TorchBuild("2.9.1", hip="6.4"), "0x1002", PROBLEM),  # sees no GPU
            (TorchBuild("2.11.0", cuda="13.0"), "0x10de", PROBLEM),
        ],
    )
    def test_build_and_cards(self, tmp_path, torch, vendor, status):
        found = cards.torch_build(machine(tmp_path, pci_card("0000:03:00.0", vendor), torch))
        assert found.status == status, found

    def test_laptop_of_amd(self, tmp_path):
        """A GPU that is part of the CPU is no reason to fail."""
        found = cards.torch_build(machine(tmp_path, radeons("gfx1036"), CPU))
        assert found.status == WARNING and "whl/rocm" in found.fix

    def test_nvidia_cards_in_a_machine_of_amd(self, tmp_path):
        found = all_of(machine(tmp_path, radeons("gfx1036") | pci_card("0000:43:00.0", "0x10de"), CUDA, {}))
        assert found["torch build"].status == OK and found["aotriton"].status == found["iommu"].status == SKIPPED

    @pytest.mark.parametrize("amd", [radeons("gfx1036"), pci_card("0000:03:00.0")])
    def test_nvidia_cards_beside_the_gpu_of_the_cpu(self, tmp_path, amd):
        """Whether its compute driver is there or not, the cards are NVIDIA's."""
        found = all_of(machine(tmp_path, amd | pci_card("0000:43:00.0", "0x10de"), CPU, {}))
        assert found["torch build"].status == PROBLEM and found["torch build"].seen.endswith("which need a CUDA build")
        assert "whl/rocm" not in found["torch build"].fix and found["permissions"].status == SKIPPED

    @pytest.mark.parametrize("torch, vendor", [(CPU, "AMD"), (ROCM, "AMD"), (CUDA, "NVIDIA")])
    def test_cards_of_both(self, tmp_path, torch, vendor):
        found = all_of(machine(tmp_path, radeons("gfx1100") | pci_card("0000:43:00.0", "0x10de"), torch, {}))
        assert (found["aotriton"].status != SKIPPED) == (vendor == "AMD")
        assert found["torch build"].status == (PROBLEM if torch is CPU else OK)

    def test_instinct_is_a_card_and_its_sound_is_not(self, tmp_path):
        instinct = machine(tmp_path / "a", pci_card("0000:03:00.0", kind="0x120000"), CPU)
        sound = machine(tmp_path / "b", pci_card("0000:03:00.1", kind="0x040300"), CPU)
        assert instinct.has_amd and not sound.has_amd

    def test_rocm_wheels_are_what_is_to_be_installed(self, tmp_path):
        assert "whl/rocm" in cards.torch_build(machine(tmp_path, pci_card("0000:03:00.0"), CPU)).fix


class TestIntegratedGpu:
    def check(self, root: Path, environment: Mapping[str, str], *architectures: str) -> Finding:
        return cards.integrated_gpu(machine(root, radeons(*architectures), environment=environment))

    def test_joins_the_cards(self, tmp_path):
        found = self.check(tmp_path, {}, "gfx1100", "gfx1100", "gfx1036")
        assert found.status == PROBLEM and found.fix.endswith("export HIP_VISIBLE_DEVICES=0,1")

    def test_comes_first(self, tmp_path):
        found = self.check(tmp_path, {}, "gfx1036", "gfx1100")
        assert found.status == PROBLEM and found.fix.endswith("export HIP_VISIBLE_DEVICES=1")

    @pytest.mark.parametrize(
        "environment, status",
        [
            ({"HIP_VISIBLE_DEVICES": "0,1"}, OK),
            ({"ROCR_VISIBLE_DEVICES": "0,1"}, OK),
            ({"CUDA_VISIBLE_DEVICES": "0"}, OK),
            ({"HIP_VISIBLE_DEVICES": "1,2"}, PROBLEM),
            ({"ROCR_VISIBLE_DEVICES": "2,0", "HIP_VISIBLE_DEVICES": "1"}, OK),
            ({"ROCR_VISIBLE_DEVICES": "2,0", "HIP_VISIBLE_DEVICES": "0"}, PROBLEM),
            ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "2"}, OK),
            ({"HIP_VISIBLE_DEVICES": "-1"}, OK),
            ({"HIP_VISIBLE_DEVICES": "0,2 "}, OK),  # HIP stops at a blank
            ({"ROCR_VISIBLE_DEVICES": "0, 2 "}, PROBLEM),  # the runtime below it does not
            ({"HIP_VISIBLE_DEVICES": "GPU-5a0d3c1d"}, SKIPPED),
            ({"ROCR_VISIBLE_DEVICES": "GPU-5a0d3c1d"}, SKIPPED),
        ],
    )
    def test_variables(self, tmp_path, environment, status):
        assert self.check(tmp_path, environment, "gfx1100", "gfx1100", "gfx1036").status == status

    def test_alone_it_is_what_there_is(self, tmp_path):
        assert self.check(tmp_path, {}, "gfx1151").status == OK


class TestArchitecture:
    def check(self, root: Path, architecture: str, **environment: str) -> Finding:
        return cards.architecture(machine(root, radeons(architecture), environment=environment))

    def test_names(self):
        assert [gfx_name(version) for version in (110001, 90010, 90402, 100306)] == [
            "gfx1101",
            "gfx90a",
            "gfx942",
            "gfx1036",
        ]

    def test_is_in_the_wheel(self, tmp_path):
        assert self.check(tmp_path, "gfx1101").status == OK

    def test_is_not_and_a_relative_is(self, tmp_path):
        found = self.check(tmp_path, "gfx1036")
        assert found.status == PROBLEM and found.fix == "export HSA_OVERRIDE_GFX_VERSION=10.3.0"
        (tmp_path / "b").mkdir()
        assert self.check(tmp_path / "b", "gfx1036", HSA_OVERRIDE_GFX_VERSION="10.3.0").status == OK

    @pytest.mark.parametrize(
        "name, value", [("GPU_DEVICE_ORDINAL", "0"), ("HIP_VISIBLE_DEVICES", "0,1"), ("LANG", "C")]
    )
    def test_beside_the_gpu_of_the_cpu(self, tmp_path, name, value):
        """Which may have no kernels: what would run it as another breaks the card."""
        given = machine(tmp_path, radeons("gfx1101", "gfx1036"), environment={name: value})
        assert cards.architecture(given).status == OK and cards.integrated_gpu(given).status == PROBLEM

    def test_nothing_is_visible(self, tmp_path):
        given = machine(tmp_path, radeons("gfx1101", "gfx1036"), environment={"HIP_VISIBLE_DEVICES": "0 ,1"})
        assert cards.visible(given) == [] and cards.architecture(given).status == SKIPPED

    @pytest.mark.parametrize("others, fix", [((), "export HSA"), (("gfx1100",), "export HSA"), (("gfx942",), "pip")])
    def test_override_is_for_all(self, tmp_path, others, fix):
        torch = TorchBuild("2.9.1", hip="6.4", architectures=("gfx942", "gfx1100"))
        found = cards.architecture(machine(tmp_path, radeons("gfx1101", *others), torch, {}))
        assert found.status == PROBLEM and found.fix.startswith(fix)

    def test_has_no_relative(self, tmp_path):
        found = self.check(tmp_path, "gfx1151")
        assert found.status == PROBLEM and "pip install" in found.fix

    @pytest.mark.parametrize("value", ["11.0", "gfx1100", "9.9.9"])
    def test_override_that_is_none(self, tmp_path, value):
        assert self.check(tmp_path, "gfx1100", HSA_OVERRIDE_GFX_VERSION=value).status == PROBLEM

    def test_by_amd_smi_where_the_driver_does_not_say(self, tmp_path):
        tools = {"amd-smi static": (FIXTURES / "amd_smi_static.txt").read_text()}
        files = {name: text for name, text in radeons(*TWO).items() if "kfd/topology" not in name}
        found = cards.architecture(machine(tmp_path, files, tools=tools))
        assert found.status == OK and found.seen.startswith("gfx1100;")
        without = cards.architecture(machine(tmp_path, files, tools={"amd-smi static": "GPU: 0\n    ASIC:\n"}))
        assert without.status == SKIPPED


class TestVariablesOfAMD:
    def test_aotriton(self, tmp_path):
        files = radeons("gfx1100")
        found = cards.aotriton(machine(tmp_path, files, environment={}))
        assert found.status == WARNING and "export TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1" in found.fix
        off = machine(tmp_path, files, environment={"TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": "0"})
        assert cards.aotriton(off).status == WARNING
        assert cards.aotriton(machine(tmp_path, files)).status == OK

    @pytest.mark.parametrize(
        "architecture", ["gfx90a", "gfx942", "gfx950", "gfx1030", "gfx1100", "gfx1151", "gfx1201"]
    )
    def test_what_the_launcher_would_set(self, tmp_path, architecture):
        """And nothing else is what is missed."""
        given = machine(tmp_path, radeons(architecture), environment={})
        names = {setting.name for setting in unset({architecture}, 1, {})}
        for check, name in (
            (cards.aotriton, "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"),
            (cards.miopen_find_mode, "MIOPEN_FIND_MODE"),
        ):
            assert check(given).status == (WARNING if name in names else SKIPPED)

    @pytest.mark.parametrize("value, status", [(None, WARNING), ("NORMAL", WARNING), ("FAST", OK), ("2", OK)])
    def test_miopen(self, tmp_path, value, status):
        environment = {} if value is None else {"MIOPEN_FIND_MODE": value}
        assert cards.miopen_find_mode(machine(tmp_path, radeons(*TWO), environment=environment)).status == status


class TestPermissions:
    def test_not_allowed(self, tmp_path):
        given = machine(tmp_path, radeons(*TWO), access=lambda file: file.name != "renderD129")
        found = cards.permissions(given)
        assert found.status == PROBLEM and found.seen.endswith("/dev/dri/renderD129") and "usermod" in found.fix
        given = machine(tmp_path, radeons(*TWO), access=lambda file: file.name != "kfd")
        assert "open /dev/kfd" in cards.permissions(given).seen

    @pytest.mark.parametrize("gone", ["/dev/kfd", "/dev/dri/renderD128"])
    def test_not_there(self, tmp_path, gone):
        found = cards.permissions(machine(tmp_path, radeons("gfx1100") | {gone: None}))
        assert found.status == PROBLEM and "--device /dev/kfd" in found.fix

    def test_one_may_really_not_open_it(self, tmp_path):
        """By the kernel's answer, where the tests do not run as root."""
        files = machine(tmp_path, radeons(*TWO))
        (tmp_path / "dev/kfd").chmod(0)
        real = Machine(files.torch, tmp_path, {}, files.run)
        import os

        assert (cards.permissions(real).status == PROBLEM) == (os.geteuid() != 0)


class TestCollectiveLibrary:
    @pytest.mark.parametrize("commit, status", [("96a25b5", PROBLEM), ("0d2c4fd", OK)])
    def test_builds(self, tmp_path, commit, status):
        folder = tmp_path / "torch"
        folder.mkdir()
        (folder / "librccl.so.1").write_bytes(b"\x7fELF" + bytes(5000) + f"2.27.7-HEAD:{commit}\0".encode())
        torch = TorchBuild("2.9.1", hip="6.4", folder=str(folder))
        assert cards.collective_library(machine(tmp_path, {}, torch)).status == status

    def test_none_and_empty(self, tmp_path):
        assert cards.collective_library(machine(tmp_path, {})).status == SKIPPED
        given = machine(tmp_path, {"/opt/rocm/lib/librccl.so.1": ""})
        assert cards.collective_library(given).status == OK


class TestHost:
    @pytest.mark.parametrize(
        "line, status",
        [
            ("quiet iommu=pt", OK),
            ("amd_iommu=on iommu=pt", OK),
            ("amd_iommu=off", OK),
            ("intel_iommu=on,sm_on", WARNING),
            ("quiet", WARNING),
            ("iommu=nopt", WARNING),
            ("amd_iommu=pt", WARNING),  # which means nothing
            ("iommu.passthrough=1", OK),
            ("iommu.passthrough=0", WARNING),
        ],
    )
    def test_iommu(self, tmp_path, line, status):
        files = radeons(*TWO) | {"/proc/cmdline": line}
        assert host.iommu(machine(tmp_path, files)).status == status

    @pytest.mark.parametrize("kinds, status", [(("identity",) * 2, OK), (("identity", "DMA-FQ"), WARNING)])
    def test_iommu_by_its_groups(self, tmp_path, kinds, status):
        """What a kernel does that was built to, and given nothing of it."""
        groups = {f"/sys/kernel/iommu_groups/{index}/type": f"{kind}\n" for index, kind in enumerate(kinds)}
        files = radeons(*TWO) | {"/proc/cmdline": "quiet"} | groups
        assert host.iommu(machine(tmp_path, files)).status == status
        # Where a card's own group is known the others do not count.
        own = {f"{BUS}/0000:{address}:00.0/iommu_group/type": "identity" for address in ("03", "23")}
        assert host.iommu(machine(tmp_path, files | own)).status == OK

    def test_no_iommu(self, tmp_path):
        files = radeons(*TWO) | {"/proc/cmdline": "quiet", "/sys/class/iommu/ivhd0/version": None}
        assert host.iommu(machine(tmp_path, files)).status == OK

    @pytest.mark.parametrize("value, status", [("0", OK), ("1", WARNING), ("2", WARNING), (None, SKIPPED)])
    def test_numa_balancing(self, tmp_path, value, status):
        files = {"/proc/sys/kernel/numa_balancing": value}
        assert host.numa_balancing(machine(tmp_path, files)).status == status

    @pytest.mark.parametrize("free, status", [(64 << 20, PROBLEM), (8 << 30, OK)])
    def test_shared_memory(self, tmp_path, free, status):
        found = host.shared_memory(machine(tmp_path, radeons(*TWO), free=lambda file: free))
        assert found.status == status and (status == OK or "--shm-size" in found.fix)

    def test_no_shared_memory(self, tmp_path):
        assert host.shared_memory(machine(tmp_path, {})).status == PROBLEM

    @pytest.mark.parametrize(
        "limit, status", [("65536", PROBLEM), ("unlimited", OK), (str(64 << 30), OK), ("?", SKIPPED)]
    )
    def test_locked_memory(self, tmp_path, limit, status):
        files = {
            "/proc/self/limits": f"Max open files  1024  1024  files\nMax locked memory  {limit}  unlimited  bytes\n"
        }
        assert host.locked_memory(machine(tmp_path, files)).status == status


class TestRdma:
    def check(self, root: Path, files: Mapping[str, str | None], **environment: str) -> dict[str, Finding]:
        tools = TOPOLOGY | {"ibv_devices": (FIXTURES / "ibv_devices.txt").read_text()}
        return all_of(machine(root, radeons(*TWO) | files, ROCM, GOOD_SETTINGS | environment, tools))

    FILES = rdma_device("mlx5_0", gids=["fe80::1", "fe80::2", "0000:0000:0000:0000:0000:0000:0000:0000"])

    def test_up(self, tmp_path):
        found = self.check(tmp_path, self.FILES | {"/dev/infiniband/uverbs0": ""})
        assert found["rdma devices"].status == OK and found["rdma devices"].seen == "mlx5_0:1 RoCE ACTIVE"
        assert found["rdma library"].status == OK and found["locked memory"].status == OK

    def test_not_given_to_the_container(self, tmp_path):
        found = self.check(tmp_path, self.FILES)["rdma devices"]
        assert found.status == PROBLEM and "--device /dev/infiniband" in found.fix

    def test_down(self, tmp_path):
        files = rdma_device("mlx5_0", "1: DOWN") | {"/dev/infiniband/uverbs0": ""}
        assert self.check(tmp_path, files)["rdma devices"].status == PROBLEM

    def test_library(self, tmp_path):
        files = rdma_device("bnxt_re0") | {"/dev/infiniband/uverbs0": ""}
        assert "does not know bnxt_re0" in self.check(tmp_path, files)["rdma library"].seen
        tools = {"ibv_devices": (FIXTURES / "ibv_devices_abi.txt").read_text()}
        found = host.rdma_library(machine(tmp_path, files, tools=tools))
        assert found.status == PROBLEM and "kernel ABI 6" in found.seen

    @pytest.mark.parametrize("index, status", [("1", OK), ("2", PROBLEM), ("9", PROBLEM), ("", SKIPPED)])
    def test_gid(self, tmp_path, index, status):
        assert self.check(tmp_path, self.FILES, NCCL_IB_GID_INDEX=index)["rdma gid"].status == status

    @pytest.mark.parametrize(
        "value, status",
        [
            ("mlx5_0", OK),
            ("mlx5", OK),
            ("=mlx5_0:1", OK),
            ("=mlx5", PROBLEM),
            ("bnxt_re0", PROBLEM),
            ("mlx5_0:2", PROBLEM),
            ("mlx5_0,mlx5_7", WARNING),
            ("mlx5_0:1,mlx5_0:2", WARNING),
            ("^mlx5_7", OK),
        ],
    )
    def test_names(self, tmp_path, value, status):
        found = self.check(tmp_path, self.FILES, NCCL_IB_HCA=value)["rdma names"]
        assert found.status == status and (status == OK or found.fix == "export NCCL_IB_HCA=mlx5_0")
        if status == WARNING:
            assert f": {value.split(',')[1]} is none of mlx5_0:1" in found.seen

    def test_gid_is_of_the_port(self, tmp_path):
        files = {"/sys/class/infiniband/mlx5_0/ports/2/gids/1": "0000:0000:0000:0000:0000:0000:0000:0000"}
        for hca, status in (("mlx5_0:1", OK), ("mlx5_0:2", PROBLEM)):
            found = self.check(tmp_path, self.FILES | files, NCCL_IB_HCA=hca, NCCL_IB_GID_INDEX="1")
            assert found["rdma gid"].status == status

    def test_names_without_devices(self, tmp_path):
        assert self.check(tmp_path, {}, NCCL_IB_HCA="mlx5_0")["rdma names"].status == PROBLEM


def test_kfd_nodes_are_in_their_numbers_order(tmp_path):
    """Which is HIP's: node 10 comes after node 2."""
    given = machine(tmp_path, kfd_node(10, "gfx1036") | kfd_node(2, "gfx1100") | kfd_node(0, None))
    assert given.kfd_architectures == ("gfx1100", "gfx1036")
