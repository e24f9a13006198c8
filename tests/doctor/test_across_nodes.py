"""Nodes compared with each other: real ranks, real processes of theirs."""

import os
import re
from dataclasses import asdict, replace
from unittest import mock

import pytest

from diffusers_rocm.doctor import across_nodes, work
from diffusers_rocm.doctor.finding import OK, PROBLEM, SKIPPED, WARNING, Finding, as_json, ok, problem, skipped

from ..testing_utils import run_ranks
from . import faulty


def clean(text: str) -> str:
    """Of a machine of this name, and of a user who is called as any of these keys and words of JSON are."""
    words = r"\b(node|device|static|status|problem|cpu|versions|settings|result|wrong|failure|log|null)\b"
    return re.sub(words, "USER", text.replace("node1.secret.net", "HOST"))


def worker(instead: str, versions: dict[str, str], settings: dict[str, str]) -> list[dict[str, str]]:
    """Findings of a rank; the ranks stand for nodes of one rank each."""
    rank = int(os.environ["RANK"])
    static = [replace(ok("fine"), name="a"), replace(skipped("no card"), name="b")]
    if rank == 1:
        static[0] = replace(problem("node1.secret.net is broken", "mend it"), name="a")
    environment = {"MASTER_ADDR": "localhost"}
    stand_in = mock.patch.object(work, "exchange", getattr(faulty, instead)) if instead else mock.MagicMock()
    with mock.patch.dict(os.environ, environment), stand_in:
        mine = across_nodes.Place(
            node=rank,
            local_rank=0,
            device="cpu",
            rdma=False,
            static=as_json(static),
            versions=versions | ({"torch": "2.9.1"} if rank == 1 and "torch" in versions else {}),
            settings={name: value if rank == 0 else f"{value}0" for name, value in settings.items()},
        )
        seconds = 10 if instead == "hang_instead" else 120
        found = across_nodes.across_nodes(mine, seconds, True, clean)
        return [asdict(each) for each in found]


def findings(*arguments) -> dict[str, Finding]:
    """All ranks find the same."""
    first, second = run_ranks(2, worker, *arguments)
    assert first == second
    found = [Finding(**each) for each in first]
    return {f"{each.name} 1" if each.seen.startswith("node 1") else each.name: each for each in found}


class TestAcrossNodes:
    def test_alike_and_working(self):
        found = findings("", {"diffusers": "0.42.1"}, {})
        for name in ("clocks", "versions", "settings", "collectives", "bandwidth"):
            assert found[name].status == OK, found[name]
        assert found["channels"].status == SKIPPED
        # What one node shows by itself is said to be missing here.
        for name in ("copies", "peer to peer", "attention kernels", "sdpa"):
            assert found[name] == Finding(SKIPPED, across_nodes.OF_ONE_NODE, name=name)
        # The first node's findings, and of the others' what is not fine.
        assert found["a"].seen == "node 0: fine" and found["a 1"] == Finding(
            PROBLEM, "node 1: HOST is broken", "mend it", "a"
        )
        assert found["b"].seen == "no card"

    def test_different(self):
        found = findings("hang_instead", {"torch": "2.11.0"}, {"NCCL_ALGO": "1", "NCCL_SOCKET_IFNAME": "a"})
        assert (
            found["versions"].status == PROBLEM
            and found["versions"].seen == "torch: 2.11.0 on rank 0, 2.9.1 on rank 1"
        )
        assert found["versions"].fix == "pip install torch==2.11.0  # on every node"
        assert found["settings"].status == PROBLEM and found["settings"].seen == "NCCL_ALGO: 1 on rank 0, 10 on rank 1"
        assert found["settings"].fix == "export NCCL_ALGO=1  # on every node"
        # And it hung, on both, which did not keep the rest.
        assert found["collectives"].status == PROBLEM and found["bandwidth"].status == SKIPPED
        for rank in (0, 1):
            assert f"rank {rank} hung at nothing at all: killed after 10 s" in found["collectives"].seen

    def test_rank_that_dies(self):
        """Is the first to be named."""
        found = findings("die_instead", {}, {})
        assert found["collectives"].seen.startswith("rank 1 was killed by SIGKILL at the collective")


class TestJudgements:
    @pytest.mark.parametrize("offset, status", [(0, OK), (200, OK), (-800, WARNING), (3_600_000, WARNING)])
    def test_clock(self, offset, status):
        """Milliseconds; the network's own time, and one late round, do not count."""
        rounds = [[second * 10**9, second * 10**9 + offset * 10**6 + 2 * 10**5] for second in range(5)]
        rounds[2][1] += 2 * 10**9
        found = across_nodes.clock(rounds)
        assert found.status == status and (status == OK or f"rank 1 is {offset / 1000:+.3f} s" in found.seen)

    def test_what_may_differ(self):
        by_rank = [{"RANK": "0", "HIP_VISIBLE_DEVICES": "0", "NCCL_IB_HCA": "a"}, {"RANK": "1", "NCCL_IB_HCA": "b"}]
        assert across_nodes.alike("settings", by_rank).status == OK

    @pytest.mark.parametrize(
        "value, fix",
        [
            ("Tree;rm -rf x", "export NCCL_ALGO='Tree;rm -rf x'; export NCCL_PROTO=LL  # on every node"),
            ("Tree", "export NCCL_ALGO=Tree; export NCCL_PROTO=LL  # on every node"),
            (
                "/home/USER/x",
                'export NCCL_PROTO=LL; echo "$NCCL_ALGO"  # on every node, where NCCL_ALGO should be what rank 0 has',
            ),
            (
                "~/x",
                'export NCCL_PROTO=LL; echo "$NCCL_ALGO"  # on every node, where NCCL_ALGO should be what rank 0 has',
            ),
        ],
    )
    def test_what_is_to_be_pasted(self, value, fix):
        """Is one word to a shell, and nobody's place-holder."""
        by_rank = [{"NCCL_ALGO": value, "NCCL_PROTO": "LL"}, {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}]
        assert across_nodes.alike("settings", by_rank).fix == fix

    def test_what_costs_no_more_than_time(self):
        found = across_nodes.alike("settings", [{}, {"MIOPEN_FIND_MODE": "FAST"}])
        assert found.status == WARNING and found.fix == "unset MIOPEN_FIND_MODE  # on every node"
