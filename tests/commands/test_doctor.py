"""`diffusers-rocm doctor`: exit codes, what is printed, and under torchrun on two nodes."""

import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusers_rocm import commands
from diffusers_rocm.commands import doctor
from diffusers_rocm.doctor import kernel_work, privacy, work
from diffusers_rocm.doctor.machine import Machine
from diffusers_rocm.models.attention_kernels import KERNELS

from ..doctor import faulty
from ..doctor.machines import CPU, CUDA, machine, radeons


ROOT = Path(__file__).parents[2]
ON_A_GPU = torch.cuda.is_available()


def run(*options: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = commands.main(["doctor", *options])
    return code, output.getvalue(), errors.getvalue()


class TestMisuse:
    @pytest.mark.parametrize(
        "options, message",
        [
            (("--gpus", "0"), "--gpus must be at least 1; got 0"),
            (("--gpus", "-2"), "--gpus must be at least 1; got -2"),
            (("--timeout", "0"), "--timeout must be from 1 to 3600 seconds; got 0.0"),
            (("--timeout", "nan"), "--timeout must be from 1 to 3600 seconds; got nan"),
        ],
    )
    def test_one_line(self, options, message):
        assert run(*options) == (2, "", f"diffusers-rocm: {message}\n")

    @pytest.mark.parametrize("options", [("--gpus", "two"), ("--device", "tpu"), ("--what",)])
    def test_by_the_parser(self, options):
        with pytest.raises(SystemExit) as caught:
            run(*options)
        assert caught.value.code == 2

    @settings(max_examples=80, deadline=None)
    @given(
        words=st.lists(
            st.sampled_from(["--static", "--gpus", "--device", "--timeout", "--json", "cpu", "cuda", "2", "-1", "1e9"])
            | st.text(max_size=6),
            max_size=5,
        )
    )
    def test_any_words(self, words):
        """A request, or one line and exit code 2: never a traceback."""
        with (
            mock.patch.object(doctor, "ask_torch", lambda seconds: (CPU, "")),
            mock.patch.object(doctor, "diagnose", lambda request, args: iter(())),
        ):
            try:
                code, output, errors = run(*words)
            except SystemExit as end:
                code = end.code
                assert code == 2 or "-h" in " ".join(words)
            else:
                assert code == 0 or (code == 2 and re.fullmatch(r"diffusers-rocm: [^\n]*\n", errors) and not output)

    def test_more_gpus_than_there_are(self):
        code, output, errors = run("--device", "cuda", "--gpus", "99")
        assert code == 2 and re.fullmatch(r"diffusers-rocm: --gpus 99: \d+ are visible; .*\n", errors) and not output

    def test_under_torchrun(self):
        with mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="2"):
            code, _, errors = run("--gpus", "2")
        assert code == 2 and "torchrun has started the ranks" in errors


@pytest.fixture(scope="module")
def on_cpu():
    """Everything that it does, on two ranks of CPU."""
    return run("--device", "cpu", "--json")


class TestOnCpu:
    @pytest.fixture
    def found(self, on_cpu):
        return {each["name"]: each for each in json.loads(on_cpu[1])["findings"]}

    def test_exit_code(self, on_cpu):
        content = json.loads(on_cpu[1])
        problems = [each for each in content["findings"] if each["status"] == "problem"]
        assert on_cpu[0] == content["exit_code"] == int(problems != [])
        assert content["versions"]["torch"] == torch.__version__

    def test_every_probe_runs(self, found):
        for name in ("copies", "collectives", "bandwidth", "attention flash_cpu", "attention math"):
            assert found[name]["status"] == "OK", found[name]
        for name in ("peer to peer", "channels", "sdpa"):
            assert found[name]["status"] == "skipped", found[name]

    def test_every_kernel_is_named(self, found):
        assert {name.removeprefix("attention ") for name in found if name.startswith("attention ")} == set(KERNELS)
        assert found["attention aiter"]["seen"] == "runs on rocm, not on cpu"
        assert "lse [2, 3, 130]" in found["attention flash_cpu"]["seen"]  # heads first, as this kernel has it
        assert "float32 masked" in found["attention flash_cpu"]["seen"]

    def test_sizes(self, found):
        assert (
            "28.3 MB: all-reduce" in found["bandwidth"]["seen"] and "1.0 MB: all-reduce" in found["bandwidth"]["seen"]
        )
        assert found["collectives"]["seen"].endswith("of 1.0 MB and 28.3 MB: verified on 2 ranks")


class TestDoctor:
    @pytest.mark.skipif(ON_A_GPU, reason="of a machine without a GPU")
    def test_text(self):
        with mock.patch.dict(os.environ, {"NCCL_DEBUG": "WARN"}):
            code, output, _ = run("--static")
        assert code == 0
        assert re.search(r"^OK       torch build            torch \S+ \(CPU only\), 0 GPU\(s\) to it$", output, re.M)
        assert "copies" not in output and "no AMD GPU" in output
        assert output.splitlines()[-1] == "0 problem, 0 warning, 2 OK, 20 skipped", output

    def test_a_problem(self):
        with mock.patch.dict(os.environ, {"NCCL_P2P_DISABLE": "please"}):
            code, output, _ = run("--static", "--device", "cpu")
            json_code, as_json, _ = run("--static", "--json", "--device", "cpu")
        assert code == json_code == 1
        assert "problem  values                 NCCL_P2P_DISABLE='please' is not a number\n" in output
        assert f"\n{'':31} fix: unset NCCL_P2P_DISABLE\n" in output
        assert json.loads(as_json)["exit_code"] == 1

    def test_torch_that_does_not_answer(self, monkeypatch):
        """Nothing is tried, everything else is looked at."""
        monkeypatch.setattr(work, "ask_torch", faulty.abort)
        code, output, _ = run()
        assert code == 1 and "torch could not be asked: rank 0 was killed by SIGABRT" in output
        assert "torch build" in output and "copies" not in output

    def test_a_probe_that_hangs(self, monkeypatch):
        """It is killed, it is told of, and the others are tried."""
        monkeypatch.setattr(work, "copy_between", faulty.hang_copies)
        request = doctor.DoctorRequest(CUDA, "", "cpu", 2)
        monkeypatch.setattr(doctor, "check", lambda args: request)
        monkeypatch.setattr(work, "exchange", faulty.die_alone)
        monkeypatch.setattr(kernel_work, "try_kernels", faulty.crashing_kernel)
        begin = time.monotonic()
        code, output, _ = run("--timeout", "6")
        assert code == 1 and 6 < time.monotonic() - begin < 100  # 120, if not told otherwise
        assert "copies                 rank 0 hung at copying for ever: killed after 6 s" in output
        assert "collectives            rank 1 was killed by SIGKILL at the collective" in output
        assert "attention flash_cpu    rank 0 was killed by SIGSEGV" in output

    @mock.patch.object(privacy.getpass, "getuser", lambda: "somebody")
    @mock.patch.object(privacy.socket, "gethostname", lambda: "thatbox")
    def test_names_nobody(self):
        with mock.patch.dict(os.environ, {"NCCL_TOPO_FILE": "/home/somebody/thatbox.xml", "HF_TOKEN": "hf_secret"}):
            code, output, _ = run("--static", "--device", "cpu")
        assert code == 1 and "/home/USER/HOST.xml" in output
        assert "somebody" not in output and "thatbox" not in output and "hf_secret" not in output

    @mock.patch.object(privacy.getpass, "getuser", lambda: "unset")
    def test_a_fix_is_to_be_pasted(self):
        """Whatever the user is called."""
        with mock.patch.dict(os.environ, {"NCCL_P2P_DISABLE": "please"}):
            assert " fix: unset NCCL_P2P_DISABLE\n" in run("--static", "--device", "cpu")[1]

    def test_a_machine_of_radeons(self, tmp_path, monkeypatch):
        """The whole command on a folder that stands in for one, with the CPU's own GPU among its cards."""
        given = machine(tmp_path, radeons("gfx1100", "gfx1036"), environment={})
        monkeypatch.setattr(doctor, "Machine", lambda build: given)
        code, output, _ = run("--static", "--device", "cpu")
        assert code == 1 and "export HIP_VISIBLE_DEVICES=0\n" in output
        assert "warning  miopen find mode" in output and "fix: export MIOPEN_FIND_MODE=FAST" in output

    def test_ended_from_outside(self):
        """What it was trying ends with it."""
        program = (
            "import sys; from unittest import mock; from diffusers_rocm import commands; "
            "from diffusers_rocm.commands import doctor; from diffusers_rocm.doctor import work; "
            "from tests.doctor import faulty; from tests.doctor.machines import CPU; "
            "work.copy_between = faulty.hang_copies; "
            "doctor.check = lambda args: doctor.DoctorRequest(CPU, '', 'cpu', 2); "
            "sys.exit(commands.main(['doctor']))"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        children: list[int] = []
        deadline = time.monotonic() + 60
        while not children and time.monotonic() < deadline:
            listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            children = [int(pid) for pid in listed if "child.py" in Path(f"/proc/{pid}/cmdline").read_text()]
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert children and process.wait(20) == 128 + signal.SIGTERM
        assert not any(Path(f"/proc/{pid}").exists() for pid in children)


class TestTorchrun:
    @pytest.mark.parametrize("variables", [{"RANK": "0"}, {"RANK": "x"}, {"RANK": "0", "GROUP_RANK": "x"}])
    def test_variables_that_torchrun_does_not_set(self, variables):
        with mock.patch.dict(os.environ, {"WORLD_SIZE": "2"} | variables):
            code, output, errors = run("--static")
        assert code == 2 and not output
        assert re.fullmatch(r"diffusers-rocm: RANK=.* not what torchrun sets .*\n", errors), errors

    @pytest.mark.parametrize("rank, why", [(1, "Connection refused"), (0, "1/2 clients joined")])
    def test_others_that_do_not_come(self, rank, why):
        """One line, nothing of torch's own, and long before the 300 s that torch would wait."""
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = str(free.getsockname()[1])
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        command = [sys.executable, "-m", "diffusers_rocm", "doctor", "--static", "--timeout", "2"]
        ended = subprocess.run(
            command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=200
        )
        assert ended.returncode == 2 and not ended.stdout
        wanted = rf"diffusers-rocm: rank {rank} of 2 waited 2 s for the others at localhost:{port}: .*{why}; .*"
        assert re.fullmatch(wanted, ended.stderr.splitlines()[-1]) and "c10d" not in ended.stderr, ended.stderr

    @pytest.mark.skipif(os.environ.get("RUN_SLOW") != "1", reason="slow: set RUN_SLOW=1")
    def test_two_nodes(self):
        """Two agents of one rank each; something is wrong on the second, and the collective is tried all the same."""
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        common = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        common += ["--master-addr", "localhost", "--master-port", str(port)]
        agents = [
            subprocess.Popen(
                [*common, "--node-rank", str(node), "-m", "diffusers_rocm", "doctor", "--device", "cpu", "--json"],
                cwd=ROOT,
                env=os.environ | {"NCCL_SHM_DISABLE": "nonsense"[: 8 * node] or "0", "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for node in (0, 1)
        ]
        outputs = [agent.communicate(timeout=240)[0] for agent in agents]
        assert outputs[1] == ""  # the first rank speaks
        content = json.loads(outputs[0])
        found = [(each["name"], each["status"], each["seen"]) for each in content["findings"]]
        assert ("values", "problem", "node 1: NCCL_SHM_DISABLE='nonsense' is not a number") in found
        assert ("settings", "problem", "NCCL_SHM_DISABLE: 0 on rank 0, nonsense on rank 1") in found
        assert ("collectives", "OK") in [each[:2] for each in found] and ("clocks", "OK") in [
            each[:2] for each in found
        ]
        assert content["exit_code"] == 1 and all(agent.returncode != 0 for agent in agents)


def test_the_machine_is_this_one():
    """By default it is read from its root."""
    assert Machine(CUDA).root == Path("/") and Machine(CUDA).environment["PATH"] == os.environ["PATH"]
