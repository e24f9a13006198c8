"""Ranks that hang, die and fail end in time, and it is said how."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diffusers_rocm.doctor.children import CHILD, run_ranks

from . import faulty


def ended(pid: int) -> bool:
    """Gone, or a zombie that only its parent has to collect."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


class TestChildren:
    def test_hangs(self, tmp_path):
        """Killed in time, and nothing that it started is left."""
        begin = time.monotonic()
        outcome = run_ranks(faulty.hang, 2, {"pid_file": str(tmp_path / "pids")}, 6)
        assert 6 <= time.monotonic() - begin < 12
        assert outcome.failure == "rank 0 and rank 1 hung at sleeping: killed after 6 s" and outcome.results == {}
        pids = [int(word) for file in tmp_path.glob("pids.*") for word in file.read_text().split()]
        assert len(pids) == 4
        deadline = time.monotonic() + 5
        while not all(map(ended, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert all(map(ended, pids))

    @pytest.mark.parametrize("who, by", [(1, signal.SIGKILL), (0, signal.SIGSEGV)])
    def test_dies(self, who, by):
        """The rank that died is named, not the one that lost it; and nobody waits for the time to be over."""
        begin = time.monotonic()
        outcome = run_ranks(faulty.die, 2, {"who": who, "by": by}, 100)
        assert outcome.failure == f"rank {who} was killed by {signal.Signals(by).name} at the collective"
        assert outcome.results[1 - who]["wrong"] == {"a collective": 0} and time.monotonic() - begin < 60

    def test_dies_and_nobody_hears_of_it(self):
        """The one that waits has some seconds, not all of its time; and it is not the one that hung."""
        begin = time.monotonic()
        outcome = run_ranks(faulty.die_alone, 2, {"device": "cpu", "local_ranks": [0, 0]}, 60)
        assert outcome.failure == "rank 1 was killed by SIGKILL at the collective" and time.monotonic() - begin < 30

    def test_aborts(self):
        """As a library does on an error of its own, without a word."""
        outcome = run_ranks(faulty.abort, 1, {}, 100)
        assert outcome.failure == "rank 0 was killed by SIGABRT at the collective"

    def test_raises(self):
        outcome = run_ranks(faulty.raise_error, 2, {"who": 1}, 100)
        assert outcome.failure == "rank 1 failed before it began: RuntimeError: rank 1 has no luck"

    def test_nobody_is_left_to_kill_it(self, tmp_path):
        """A rank ends by itself, ten seconds after its time."""
        order = {
            "path": "",
            "file": faulty.__file__,
            "function": "hang_instead",
            "world": 1,
            "meet": "",
            "seconds": -9,
        }
        (tmp_path / "order").write_text(json.dumps(order | {"arguments": {"device": "", "local_ranks": []}}))
        ended = subprocess.run([sys.executable, CHILD, tmp_path / "order", "0"], timeout=30)
        assert ended.returncode == -signal.SIGALRM and (tmp_path / "stage.0").read_text() == "nothing at all"

    def test_environment(self, monkeypatch):
        """A launcher's ranks are not these."""
        monkeypatch.setenv("RANK", "3")
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        monkeypatch.setenv("MIOPEN_FIND_MODE", "FAST")
        names = ["RANK", "TORCHELASTIC_USE_AGENT_STORE", "MIOPEN_FIND_MODE", "NCCL_P2P_DISABLE"]
        outcome = run_ranks(faulty.environment, 1, {"names": names}, 100, {"NCCL_P2P_DISABLE": "1"})
        assert list(outcome.results[0].values()) == [None, None, "FAST", "1"] and outcome.failure == ""

    def test_log(self):
        assert run_ranks(faulty.write_log, 1, {"text": "NCCL version 2.28.9"}, 100).log == "NCCL version 2.28.9"

    def test_nothing_is_left_in_the_temporary_folder(self, tmp_path, monkeypatch):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        run_ranks(faulty.environment, 1, {"names": []}, 100)
        assert os.listdir(tmp_path) == []
