"""The launcher: a failing rank ends the run and has the last word; nothing outlives it."""

import io
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from parameterized import parameterized

from diffusers_rocm.distributed.launching import check_port, launch
from diffusers_rocm.distributed.rank_output import Forwarder
from diffusers_rocm.distributed.root_cause import Cause, root_cause

from ..testing_utils import in_process, slow


RANK = "tests.distributed.rank_that"


def start(what: str, **options) -> subprocess.Popen:
    code = f"import sys; from diffusers_rocm.distributed.launching import launch; sys.exit(launch(2, {[RANK, what]}))"
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] != "Z"


def pids(text: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"has pid (\d+)", text)]


class TestLaunch(unittest.TestCase):
    def test_a_run_that_ends(self):
        result = in_process(lambda: launch(2, [RANK, "ends"]))
        out, err = result.stdout, result.stderr
        assert result.returncode == 0, err
        assert re.search(r"^rank 0 has pid", out, re.M) and re.search(r"^\[rank 1\] rank 1 has pid", out, re.M), out
        assert "[rank 1] said by rank 1 alone" in err
        # The warning has two lines on each rank, and is printed once.
        assert err.count("the same on every rank") <= 2, err
        assert err.count("[rank 1]") == 1, err

    @parameterized.expand(
        [
            ("raises", r"rank 1 failed: RuntimeError: the cause of it all"),
            ("is killed", r"rank 1 was killed by SIGKILL"),
            ("is killed while it says why", r"rank 1 was killed by SIGXFSZ"),
            ("exits", r"rank 1 failed with exit code 7"),
        ]
    )
    def test_a_rank_that_fails_ends_the_run_and_has_the_last_word(self, what, last_line):
        result = in_process(lambda: launch(2, [RANK, what]))
        out, err = result.stdout, result.stderr
        began = max(map(float, re.findall(r"begins at (\S+)", out)))
        assert time.time() - began < 20
        assert result.returncode == 1, (out, err)
        assert re.search(last_line, err.strip().splitlines()[-1]), err
        assert "SIGTERM" not in err, err
        assert len(pids(out)) == 2 and not any(alive(pid) for pid in pids(out))

    def test_a_rank_that_is_ended_before_the_others_miss_it(self):
        # As the launcher has them: the first to end, and then the one that it ended itself.
        failures = {rank: SimpleNamespace(exitcode=-signal.SIGTERM) for rank in (1, 0)}
        with tempfile.TemporaryDirectory() as folder:  # nobody left an error there
            cause = root_cause(SimpleNamespace(failures=failures), Path(folder))
        assert cause == Cause("rank 1 was killed by SIGTERM", is_own=False)

    def test_being_ended_leaves_no_process_behind(self):
        self.check_interrupt(signal.SIGTERM)

    @slow  # a terminal's reaches the ranks as well, below
    def test_an_interrupt_leaves_no_process_behind(self):
        self.check_interrupt(signal.SIGINT)

    def check_interrupt(self, number: signal.Signals) -> None:
        process = start("hangs")
        lines = []
        while len(pids("".join(lines))) < 2 and (line := process.stdout.readline()):  # torch 2.9's Gloo says more
            lines.append(line)
        started = pids("".join(lines))
        assert len(started) == 2 and all(alive(pid) for pid in started), lines
        process.send_signal(number)
        interrupted = time.monotonic()
        _, err = process.communicate(timeout=60)
        assert time.monotonic() - interrupted < 20
        assert process.returncode == 128 + number, err
        assert err.strip().splitlines()[-1] == f"diffusers-rocm: stopped by {number.name}", err
        assert not any(alive(pid) for pid in started)

    def test_ctrl_c_in_a_terminal_reaches_the_ranks_too(self):
        process = start("hangs", start_new_session=True)
        started = pids("".join(process.stdout.readline() for _ in range(2)))
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130 and "Traceback" not in err, err
        assert err.strip().splitlines()[-1] == "diffusers-rocm: stopped by SIGINT", err
        assert not any(alive(pid) for pid in started)

    def test_what_is_said_on_the_way_comes_before_what_comes_of_it(self):
        with tempfile.TemporaryDirectory() as folder:
            files = {Path(folder, "0", f"{name}.log"): f"{name}\n" for name in ("stdout", "stderr")}
            Path(folder, "0").mkdir()
            for file, text in files.items():
                file.write_text(text)
            both = io.TextIOWrapper(io.BytesIO())
            with mock.patch.object(Path, "glob", lambda *_: files), redirect_stdout(both), redirect_stderr(both):
                Forwarder(Path(folder))._forward(last=True)
            assert both.buffer.getvalue() == b"stderr\nstdout\n"

    def test_a_port_in_use(self):
        with socket.socket() as listener:
            listener.bind(("localhost", 0))
            listener.listen()
            with pytest.raises(ValueError, match=r"--port \d+: Address already in use"):
                check_port(listener.getsockname()[1])
        check_port(0)
        with pytest.raises(ValueError, match="70000 is not a port"):
            check_port(70000)


if __name__ == "__main__":
    unittest.main()
