"""What the debug logs of NCCL and RCCL prove."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusers_rocm.doctor.debug_log import Channel, DebugLog, judge_transports, known_bad, parse, telling_lines
from diffusers_rocm.doctor.finding import OK, PROBLEM, WARNING


FIXTURES = Path(__file__).parent / "fixtures"
LOGS = sorted(file.name for file in FIXTURES.glob("*.log"))


def log_of(name: str) -> DebugLog:
    return parse((FIXTURES / name).read_text())


class TestParse:
    def test_rccl(self):
        log = log_of("rccl_p2p.log")
        assert log.channels == (Channel(0, 1, "P2P", "P2P/IPC"), Channel(1, 0, "P2P", "P2P/IPC"))
        assert log.library == "RCCL 2.27.7-HEAD:0d2c4fd"
        assert log.warnings == ("the kernel's command line has no iommu=pt",)

    def test_nccl(self):
        log = log_of("nccl.log")
        assert log.library == "NCCL 2.28.9+cuda13.0" and log.warnings == ()
        assert [(each.sender, each.receiver, each.transport, each.detail) for each in log.channels] == [
            (0, 1, "P2P", "P2P/CUMEM/read"),
            (2, 1, "P2P", "P2P/direct pointer"),
            (3, 0, "SHM", "SHM/direct/direct"),
            (0, 8, "NET/IB", "NET/IB/0/GDRDMA"),
            (8, 0, "NET/IB", "NET/IB/1(4)/GDRDMA/Shared"),
        ]

    def test_names_of_networks(self):
        assert {each.transport for each in log_of("rccl_socket.log").channels} == {"NET/Socket"}
        assert log_of("rccl_libfabric.log").channels == (
            Channel(4092, 0, "NET/AWS Libfabric", "NET/AWS Libfabric/2/GDRDMA"),
        )
        assert log_of("rccl_shm.log").channels == (Channel(0, 1, "SHM", "SHM/direct/direct"),)

    def test_warnings(self):
        assert log_of("rccl_shm.log").warnings == ("NUMA balancing is on",)
        assert log_of("rccl_bad_build.log").warnings == (
            "HIP failure: 'the operation cannot be performed in the present state'",
        )

    def test_known_bad_builds(self):
        assert "ROCm 7.2.1" in known_bad(log_of("rccl_bad_build.log").library)
        assert known_bad(log_of("rccl_p2p.log").library) == known_bad("") == ""

    @pytest.mark.parametrize("name", LOGS)
    def test_cut_anywhere(self, name):
        """Whole lines tell what they tell; at most the last one is lost, or lacks its end."""
        text = (FIXTURES / name).read_text()
        whole = parse(text)
        for end in range(len(text)):
            found = parse(text[:end])
            pairs = {(each.sender, each.receiver, each.detail[:3]) for each in whole.channels}
            assert {(each.sender, each.receiver, each.detail[:3]) for each in found.channels} <= pairs

    @settings(max_examples=60, deadline=None)
    @given(text=st.text(max_size=300))
    def test_anything(self, text):
        assert parse(text).channels == ()

    @pytest.mark.parametrize("name", LOGS)
    def test_what_is_sent_to_other_ranks(self, name):
        text = (FIXTURES / name).read_text()
        lines = telling_lines(text, str)
        assert parse(lines) == parse(text) and len(lines) < len(text)
        hosts = {line.split(":")[0] for line in text.splitlines() if " NCCL " in line}
        assert hosts and not any(host in lines for host in hosts)
        # Whatever the user is called, the channels are what they are; only a warning's words are cleaned.
        cleaned = parse(telling_lines(text, lambda words: "cleaned"))
        assert cleaned.channels == parse(text).channels and {*cleaned.warnings} <= {"cleaned"}

    @pytest.mark.parametrize("time", ["[2025-11-02 12:00:01] {}", "2025-11-02 12:00:01 {}"])
    def test_times(self, time):
        """Of NCCL_DEBUG_TIMESTAMP_LEVELS."""
        text = (FIXTURES / "nccl.log").read_text()
        timed = "\n".join(time.format(line) for line in text.splitlines())
        assert parse(timed) == parse(text) and parse(text).channels


def channel(sender: int, receiver: int, transport: str) -> Channel:
    return Channel(sender, receiver, transport.removesuffix("/GDRDMA"), f"{transport}/0")


class TestJudge:
    """Ranks 0 and 1 are one node, 2 and 3 another."""

    NODES = {0: 0, 1: 0, 2: 1, 3: 1}

    def judge(self, *channels: Channel, rdma: bool = False, peers: bool = False):
        return judge_transports(channels, self.NODES, rdma, peers)

    def test_what_is_fine(self):
        inside = channel(0, 1, "P2P")
        found = self.judge(inside, channel(1, 0, "P2P"), channel(1, 2, "NET/IB/GDRDMA"), rdma=True, peers=True)
        assert found.status == OK and found.seen == "NET/IB with GDRDMA between 1 pair(s), P2P between 1 pair(s)"
        assert self.judge(inside, channel(1, 2, "NET/AWS Libfabric/GDRDMA"), rdma=True).status == OK
        assert self.judge(inside, channel(1, 2, "NET/Socket"), rdma=False).status == OK  # nothing better is there
        assert self.judge(channel(0, 1, "SHM"), peers=False).status == OK

    def test_roce_that_fell_back_to_tcp(self):
        """That IB was found and chosen, as this log says, is no proof."""
        log = log_of("rccl_socket.log")
        found = judge_transports(log.channels, {0: 0, 1: 1}, rdma=True, peers=False)
        assert found.status == PROBLEM and "TCP" in found.seen and "/dev/infiniband" in found.fix

    @pytest.mark.parametrize("network", ["IB", "AWS Libfabric"])
    def test_rdma_through_the_host(self, network):
        """Unless one of the two ways of a pair is direct; NCCL sends through the host where there is no NVLink."""
        indirect, direct = f"NET/{network}", f"NET/{network}/GDRDMA"
        found = self.judge(channel(0, 1, "P2P"), channel(0, 2, indirect), channel(1, 3, direct), rdma=True)
        assert found.status == WARNING and found.seen.endswith(": through the host's memory")
        assert f"{indirect} with GDRDMA between 1 pair(s), {indirect} without GDRDMA between 1" in found.seen
        assert self.judge(channel(0, 2, indirect), channel(0, 2, direct), rdma=True).status == OK
        log = parse((FIXTURES / "nccl.log").read_text().replace("/GDRDMA", ""))
        assert judge_transports(log.channels, {0: 0, 8: 1}, True, False).status == WARNING

    def test_one_pair_over_tcp_is_enough(self):
        fine = [channel(0, 2, "NET/IB/GDRDMA"), channel(0, 1, "P2P")]
        assert self.judge(*fine, channel(3, 1, "NET/Socket"), rdma=True).status == PROBLEM

    def test_one_node_over_the_network(self):
        assert self.judge(channel(0, 1, "NET/IB"), rdma=True).status == PROBLEM
        assert self.judge(channel(0, 1, "NET/Socket")).status == PROBLEM

    def test_host_memory_between_peers(self):
        assert self.judge(channel(0, 1, "SHM"), peers=True).status == WARNING

    def test_ranks_of_another_group(self):
        """Say nothing of this one."""
        found = self.judge(channel(0, 1, "P2P"), channel(0, 9, "NET/Socket"), rdma=True)
        assert found.status == OK and found.seen == "P2P between 1 pair(s)"
        assert self.judge(channel(8, 9, "P2P")).status == WARNING

    def test_no_channel(self):
        assert self.judge().status == WARNING
