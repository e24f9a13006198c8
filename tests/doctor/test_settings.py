"""Static checks of environment variables, each one both ways."""

from pathlib import Path

import psutil
import pytest

from diffusers_rocm.doctor import settings
from diffusers_rocm.doctor.finding import OK, PROBLEM, SKIPPED, WARNING, Finding
from diffusers_rocm.doctor.machine import addressed_interfaces

from .machines import GOOD_SETTINGS, ROCM, all_of, machine, radeons, rdma_device


TWO = ("gfx1100", "gfx1100")


class TestSettings:
    NAMES = ("docker0", "eno1", "eno2", "ib0", "lo")

    @pytest.mark.parametrize(
        "value, names",
        [
            ("eno1", ["eno1"]),
            ("eno", ["eno1", "eno2"]),
            ("=eno", []),
            ("=eno1,ib0", ["eno1", "ib0"]),
            ("^docker,lo", ["eno1", "eno2", "ib0"]),
            ("^=eno1", ["docker0", "eno2", "ib0", "lo"]),
            ("^=eno", ["docker0", "eno1", "eno2", "ib0", "lo"]),
            ("wlan", []),
        ],
    )
    def test_syntax_of_lists(self, value, names):
        assert settings.chosen(value, self.NAMES) == names

    def check(self, root: Path, **environment: str) -> dict[str, Finding]:
        return all_of(machine(root, radeons(*TWO), ROCM, GOOD_SETTINGS | environment))

    def test_socket_interfaces(self, tmp_path):
        found = self.check(tmp_path, NCCL_SOCKET_IFNAME="ib0", GLOO_SOCKET_IFNAME="eno1,ib0")
        assert found["socket interfaces"].status == PROBLEM
        assert found["socket interfaces"].fix == "export NCCL_SOCKET_IFNAME=eno1"
        assert found["gloo interfaces"].status == PROBLEM and "'ib0' is none of" in found["gloo interfaces"].seen
        found = self.check(tmp_path, NCCL_SOCKET_IFNAME="en", GLOO_SOCKET_IFNAME="eno1")
        assert found["socket interfaces"].status == found["gloo interfaces"].status == OK
        # Gloo has no prefixes.
        assert self.check(tmp_path, GLOO_SOCKET_IFNAME="en")["gloo interfaces"].status == PROBLEM

    @pytest.mark.parametrize("value", ["ifb0", "=ifb0", "ifb", "^eno,lo"])
    def test_interfaces_that_are_down(self, tmp_path, value):
        """They are there, and carry nothing."""
        (tmp_path / "sys/class/net/ifb0").mkdir(parents=True)
        found = self.check(tmp_path, NCCL_SOCKET_IFNAME=value, GLOO_SOCKET_IFNAME="eno1,ifb0")
        assert found["socket interfaces"].status == found["gloo interfaces"].status == PROBLEM
        assert found["socket interfaces"].fix == "export NCCL_SOCKET_IFNAME=eno1"
        assert "'ifb0' is none of those" in found["gloo interfaces"].seen

    @pytest.mark.parametrize(
        "value, status", [("eno1,nope9", WARNING), ("eno1,lo", OK), ("^docker,nope9", OK), ("=eno1,=lo", WARNING)]
    )
    def test_one_of_a_list_is_not_there(self, tmp_path, value, status):
        found = self.check(tmp_path, NCCL_SOCKET_IFNAME=value)["socket interfaces"]
        assert found.status == status and ("nope9" in found.seen or "nope9" not in value)

    def test_addresses_of_this_machine(self):
        assert "lo" in addressed_interfaces() and {*addressed_interfaces()} <= {*psutil.net_if_addrs()}

    @pytest.mark.parametrize(
        "name, wrong, right",
        [
            ("NCCL_P2P_DISABLE", "yes", "1"),
            ("NCCL_P2P_DISABLE", "please", ""),
            ("TORCH_NCCL_HIGH_PRIORITY", "on", "true"),
            ("TORCH_NCCL_HIGH_PRIORITY", "2", "F"),
            ("NCCL_IB_GID_INDEX", "x", "-1"),
            ("NCCL_BUFFSIZE", "4M", "0x400000"),
            ("NCCL_DEBUG", "LOUD", "info"),
            ("NCCL_P2P_LEVEL", "NEAR", "PHB"),
            ("MIOPEN_FIND_MODE", "QUICK", "FAST"),
            ("NCCL_TOPO_FILE", "/etc/none.xml", "/proc/cmdline"),
            ("NCCL_ALGO", "foo", "ring,CollnetDirect;allreduce:^tree"),
            ("NCCL_ALGO", "Ring;allreduce:Tree,foo", ""),
            ("NCCL_PROTO", "LL,bar", "^LL128"),
        ],
    )
    def test_values(self, tmp_path, name, wrong, right):
        found = self.check(tmp_path, **{name: wrong})["values"]
        assert found.status == PROBLEM and found.fix == f"unset {name}" and wrong in found.seen
        assert self.check(tmp_path, **{name: right})["values"].status == OK

    @pytest.mark.parametrize(
        "name, wrong, right",
        [
            ("NCCL_SOCKET_FAMILY", "AF_INET9", "AF_INET6"),
            ("NCCL_SOCKET_FAMILY", "af_inet", "AF_INET"),
            ("NCCL_NET_PLUGIN", "aws-ofi,/nope.so", "/proc/cmdline"),
            ("NCCL_NET_PLUGIN", "./libnope.so", "none"),
        ],
    )
    def test_values_that_are_passed_over(self, tmp_path, name, wrong, right):
        found = self.check(tmp_path, **{name: wrong})["values"]
        assert found.status == WARNING and found.fix == f"unset {name}"
        assert self.check(tmp_path, **{name: right})["values"].status == OK

    @pytest.mark.parametrize(
        "text, number",
        [("1 ", 1), (" 1", 1), ("-1", -1), ("0x10", 16), ("010", 8), ("08", 0), ("4M", 4), ("yes", 0), ("", 0)],
    )
    def test_integers_are_read_as_c_does(self, text, number):
        assert settings.integer(text) == number

    def test_switches_that_switch_nothing(self, tmp_path):
        found = self.check(tmp_path, NCCL_P2P_DISABLE="2")["transports"]
        assert found.status == WARNING and found.seen == "NCCL_P2P_DISABLE=2 switches nothing off: only 1 does"
        assert settings.switched_off({"NCCL_IB_DISABLE": "2", "NCCL_SHM_DISABLE": "2"}) == {"NCCL_IB_DISABLE"}

    def test_network_that_is_not_there(self, tmp_path):
        assert self.check(tmp_path, NCCL_NET="IB")["transports"].status == PROBLEM
        assert self.check(tmp_path, NCCL_NET="Socket")["transports"].status == SKIPPED
        for off, status in (("0", SKIPPED), ("1 ", PROBLEM)):
            environment = {"NCCL_NET": "ib", "NCCL_IB_DISABLE": off}
            given = machine(tmp_path, rdma_device("mlx5_0"), environment=environment)
            assert settings.transports(given).status == status

    def test_transports(self, tmp_path):
        assert self.check(tmp_path, NCCL_P2P_DISABLE="1")["transports"].status == WARNING
        assert self.check(tmp_path, NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")["transports"].status == PROBLEM
        assert self.check(tmp_path, NCCL_P2P_DISABLE="0")["transports"].status == SKIPPED
        given = machine(tmp_path, rdma_device("mlx5_0"), environment={"NCCL_IB_DISABLE": "1 "})
        assert settings.transports(given).status == PROBLEM
