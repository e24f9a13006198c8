"""Launchers of several nodes: here two on one machine, and two in network namespaces of their own."""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import psutil
import torch
from parameterized import parameterized
from PIL import Image
from torch.distributed import TCPStore

from diffusers_rocm import __version__, commands
from diffusers_rocm.distributed.nodes import Meeting, Nodes, NodesFailed
from diffusers_rocm.distributed.slurm import first_host, slurm_nodes, slurm_rank

from ..testing_utils import TwoHosts, in_process, slow


ROOT = Path(__file__).parents[2]
SMALL = ["--prompt", "a red circle", "--prompt", "a green star", "--seed", "0", "--height", "64", "--width", "64"]


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return str(listener.getsockname()[1])


def generate_here(*arguments: str) -> tuple[int, str]:
    """The command in this process, its exit code and what it says of errors."""
    result = in_process(lambda: commands.main(["generate", *SMALL, *arguments]))
    return result.returncode, result.stderr


def picture(folder: Path) -> np.ndarray:
    return np.stack([np.asarray(Image.open(file)).astype(int) for file in sorted(folder.glob("0*.png"))])


class Launchers(unittest.TestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def start(self, node: int, *arguments: str, prefix: tuple[str, ...] = (), **environment: str) -> subprocess.Popen:
        command = [*prefix, sys.executable, "-m", "diffusers_rocm", "generate", *SMALL, *arguments]
        command += ["--device", "cpu", "--out", str(self.folder / f"node{node}")]
        with (self.folder / f"{node}.out").open("w") as out, (self.folder / f"{node}.err").open("w") as err:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=err)
        self.addCleanup(process.wait)
        self.addCleanup(process.terminate)  # and with it, its ranks
        return process

    def said(self, node: int) -> str:
        # A rank that is killed may leave half a character of its progress bar.
        return (self.folder / f"{node}.err").read_text(errors="replace")

    def last_line(self, node: int) -> str:
        return self.said(node).strip().splitlines()[-1]

    def check_pictures(self, *processes: subprocess.Popen) -> None:
        """All end well, the first one has the pictures of one process, and the others none."""
        for node, process in enumerate(processes):
            assert process.wait(timeout=240) == 0, self.said(node)
        assert generate_here("--steps", "2", "--out", str(self.folder / "single"))[0] == 0
        assert np.abs(picture(self.folder / "node0") - picture(self.folder / "single")).max() <= 1
        for node in range(1, len(processes)):
            assert not list((self.folder / f"node{node}").glob("*"))


class TestTwoLaunchers(Launchers):
    def nodes(self, *arguments: str) -> list[subprocess.Popen]:
        meet = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--port", free_port(), "--node-timeout", "120")
        return [self.start(node, *meet, "--node-rank", str(node), *arguments) for node in (0, 1)]

    @slow  # as two hosts do below
    def test_from_end_to_end(self):
        logs = self.folder / "logs"
        self.check_pictures(*self.nodes("--gpus", "1", "--steps", "2", "--verbose", "--log-dir", str(logs)))
        assert "--gpus 1: ulysses=2" in (self.folder / "0.out").read_text()
        # Node 0 tells of all ranks; each keeps the files of its own.
        assert re.findall(r"^INFO: rank (\d): [\d.]+ ms a step", self.said(0), re.M) == ["0", "1"], self.said(0)
        kept = [str(file.parent.relative_to(logs)) for file in logs.glob("**/stderr.log")]
        kept = sorted(re.sub(r"\d{8}-\d{6}-|ranks_\w+/", "", each) for each in kept)
        assert kept == ["node0/attempt_0/0", "node1/attempt_0/0"]

    def wait_for(self, what: Callable[[], bool], processes: list[subprocess.Popen]) -> None:
        deadline = time.monotonic() + 200
        while not what():
            assert all(process.poll() is None for process in processes), self.said(0) + self.said(1)
            assert time.monotonic() < deadline, self.said(0)
            time.sleep(0.1)

    def wait_for_steps(self, processes: list[subprocess.Popen], after: int = 0) -> None:
        self.wait_for(lambda: re.search(r"[1-9]\d*/900", self.said(0)[after:]) is not None, processes)

    def test_a_node_dies(self):
        self.check_death(1, r"diffusers-rocm: node 1 \(.+\) is gone: no sign of life for \d+ s")

    @slow
    def test_the_node_of_the_store_dies(self):
        self.check_death(0, r"diffusers-rocm: node 0 \(.+\) is gone, and with it the store at 127.0.0.1:\d+")

    def check_death(self, victim: int, last_line: str) -> None:
        processes = self.nodes("--tp", "2", "--steps", "900")
        self.wait_for_steps(processes)
        ranks = psutil.Process(processes[victim].pid).children(recursive=True)
        other = psutil.Process(processes[1 - victim].pid).children(recursive=True)
        for process in (processes[victim], *ranks):
            process.kill()
        killed = time.monotonic()
        assert processes[1 - victim].wait(timeout=60) == 1
        assert time.monotonic() - killed < 40, "a collective waits for ten minutes"
        assert re.fullmatch(last_line, self.last_line(1 - victim)), self.said(1 - victim)
        assert not psutil.wait_procs(other, timeout=10)[1]

    @slow
    def test_a_rank_dies_and_all_nodes_start_anew(self):
        processes = self.nodes("--tp", "2", "--steps", "900", "--restarts", "1")
        self.wait_for_steps(processes)
        (rank,) = psutil.Process(processes[1].pid).children()
        rank.kill()
        agent = psutil.Process(processes[1].pid)
        self.wait_for(lambda: any(child != rank for child in agent.children()), processes)
        self.wait_for_steps(processes, after=len(self.said(0)) + 200)
        agent.children()[0].kill()
        assert [process.wait(timeout=60) for process in processes] == [1, 1]
        assert re.search(r"rank 1 was killed by SIGKILL \(out of host memory\?\)$", self.last_line(1))
        assert re.search(r"node 1 \(.+\): rank 1 was killed by SIGKILL", self.last_line(0)), self.said(0)


class TestSlurm(Launchers):
    """Slurm's variables are set here, as srun sets them."""

    @slow
    def test_one_task_a_node(self):
        port = free_port()
        slurm = {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "localhost,gpu[03-05]"}
        arguments = ("--tp", "2", "--steps", "2", "--port", port)
        self.check_pictures(*(self.start(node, *arguments, **slurm, SLURM_NODEID=str(node)) for node in (0, 1)))

    @slow
    def test_one_task_a_rank(self):
        port = free_port()
        slurm = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "localhost"}
        tasks = [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in (0, 1)]
        arguments = ("--ring", "2", "--steps", "2", "--port", port)
        self.check_pictures(*(self.start(rank, *arguments, **slurm, **task) for rank, task in enumerate(tasks)))

    def test_what_the_variables_mean(self):
        job = {"SLURM_NNODES": "3", "SLURM_NODEID": "2", "SLURM_JOB_NODELIST": "gpu[07-09]"}
        assert slurm_nodes(job) == (3, 2, "gpu07")
        # A step of fewer nodes than its job.
        step = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[08-09]", "SLURM_NODEID": "1"}
        assert slurm_nodes(job | step) == (2, 1, "gpu08")
        assert slurm_nodes({"SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "gpu07"}) is None
        assert (
            slurm_nodes({"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "gpu[07-08]"}) is None
        )  # where salloc was called
        assert slurm_nodes({}) is None

        names = {"SLURM_STEP_NODELIST": "gpu[08-09]", "SLURM_STEP_NUM_NODES": "2"}
        task = names | {"SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "13", "SLURM_LOCALID": "5"}
        wanted = {"RANK": "13", "LOCAL_RANK": "5", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
        wanted |= {"MASTER_ADDR": "gpu08", "MASTER_PORT": "29500"}
        assert slurm_rank(task, 29500, 8) == wanted
        assert slurm_rank(task, 29500, 1) == wanted | {"LOCAL_RANK": "0"}  # srun --gpus-per-task=1
        assert slurm_rank(names | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}, 1, 8) == {}
        # A batch script is one process, whatever tasks its job has.
        script = {"SLURM_NTASKS": "8", "SLURM_NNODES": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
        assert slurm_rank(script, 29500, 8) == {}

    @parameterized.expand(
        [
            ("gpu03", "gpu03"),
            ("gpu[03-05,09],login1", "gpu03"),
            ("rack[1-2]n[010-020]", "rack1n010"),
            ("a-b.c[7],x", "a-b.c7"),
            ("login1,gpu[03-05]", "login1"),
        ]
    )
    def test_first_host(self, names, first):
        assert first_host(names) == first


class TestMeeting(unittest.TestCase):
    def test_an_address_where_nobody_is(self):
        port = free_port()
        where = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--port", port)
        code, stderr = generate_here("--tp", "2", *where, "--node-timeout", "1", "--out", tempfile.mkdtemp())
        wanted = (
            f"diffusers-rocm: waited 1 s for node 0 at 127.0.0.1:{port}: Connection refused; is .*--master-addr.*\n"
        )
        assert code == 1 and re.fullmatch(wanted, stderr), stderr

    def test_a_name_that_is_not_known_yet(self):
        """As that of a node of Kubernetes before it runs: it is waited for, and that is said."""
        where = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "node-0.invalid", "--port", "29500")
        with mock.patch("diffusers_rocm.distributed.nodes.NOTICE", 0.1):
            code, stderr = generate_here("--tp", "2", *where, "--node-timeout", "2", "--out", tempfile.mkdtemp())
        first, second = stderr.splitlines()
        assert code == 1 and first.startswith("WARNING: node 0 at node-0.invalid:29500 is not there yet: "), stderr
        assert second.startswith("diffusers-rocm: waited 2 s for node 0 at node-0.invalid:29500: "), stderr

    def test_a_node_that_never_comes(self):
        port = free_port()
        where = ("--nnodes", "3", "--node-rank", "0", "--master-addr", "127.0.0.1", "--port", port)
        code, stderr = generate_here("--tp", "3", *where, "--node-timeout", "1", "--out", tempfile.mkdtemp())
        assert code == 1, stderr
        assert re.fullmatch(f"diffusers-rocm: waited 1 s at 127.0.0.1:{port} for node 1, 2 of 3: .*\n", stderr), stderr

    def test_something_else_listens_there(self):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            port = listener.getsockname()[1]
            started = time.monotonic()
            with self.assertRaisesRegex(NodesFailed, f"no store of a launcher at 127.0.0.1:{port}.* does not answer"):
                Meeting(Nodes(2, 1, "127.0.0.1", port, timeout=1.0), 1)
            assert time.monotonic() - started < 15

    def meet(self, *nodes: tuple[Nodes, int]) -> list[str]:
        """What each launcher is told."""

        def told(node: Nodes, ranks: int) -> str:
            with self.assertRaises(NodesFailed) as caught:
                Meeting(node, ranks)
            return str(caught.exception)

        with ThreadPoolExecutor(len(nodes)) as pool:
            return list(pool.map(told, *zip(*nodes, strict=True)))

    def test_nodes_with_other_numbers_of_ranks(self):
        port = int(free_port())
        told = self.meet(*((Nodes(2, node, "127.0.0.1", port, 20.0), 1 + node) for node in (0, 1)))
        assert told == ["ranks a node: 1 on node 0, and 2 on node 1"] * 2

    def test_node_0_waits_until_the_others_have_read(self):
        port = int(free_port())
        own = json.dumps({"nodes": 2, "ranks a node": 2, "diffusers_rocm": __version__, "torch": torch.__version__})
        with ThreadPoolExecutor(1) as pool:
            node_0 = pool.submit(self.meet, (Nodes(2, 0, "127.0.0.1", port, 20.0), 1))
            store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
            store.set("node/1", own)
            store.get("ended/0")  # it knows by now that this node was started differently
            time.sleep(0.5)
            assert not node_0.done() and json.loads(store.get("node/0"))["ranks a node"] == 1
            store.set("ended/1", "")
            assert node_0.result(timeout=5) == ["ranks a node: 1 on node 0, and 2 on node 1"]

    def test_two_nodes_of_one_rank(self):
        port = int(free_port())
        told = self.meet(*((Nodes(3, node, "127.0.0.1", port, 3.0), 1) for node in (0, 1, 1)))
        assert f"node 1 is at 127.0.0.1:{port} already: each has a --node-rank of its own" in told[1:], told
        assert "for node 2 of 3" in told[0], told


class TestTwoHostsGenerate(TwoHosts, Launchers):
    def nodes(self, address: str, *arguments: str) -> list[subprocess.Popen]:
        meet = ("--nnodes", "2", "--master-addr", address, "--port", "29513", *arguments)
        return [
            self.start(node, *meet, "--node-rank", str(node), prefix=("ip", "netns", "exec", name))
            for node, name in enumerate(self.names)
        ]

    def test_from_end_to_end(self):
        self.check_pictures(*self.nodes("10.77.0.1", "--tp", "2", "--steps", "2"))

    def test_a_wrong_address(self):
        processes = self.nodes("10.77.0.3", "--tp", "2", "--steps", "2", "--node-timeout", "2")
        assert [process.wait(timeout=120) for process in processes] == [1, 1]
        assert re.match(r"diffusers-rocm: waited 2 s at 10.77.0.3:29513 for node 1 of 2", self.last_line(0))
        assert re.match(r"diffusers-rocm: waited 2 s for node 0 at 10.77.0.3:29513: ", self.last_line(1))


if __name__ == "__main__":
    unittest.main()
