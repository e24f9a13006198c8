"""What the ranks of a launcher say, on its own streams.

Rank 0's output passes as it is, progress bars included. What the other ranks print is prefixed with their rank, and
not repeated where another rank printed the same line.
"""

import re
import sys
import threading
import time
from pathlib import Path
from typing import TextIO


class Forwarder:
    """Reads the files that the ranks of this node write to and prints them, as the module says.

    Args:
        folder: of the ranks' files: `.../LOCAL_RANK/stdout.log`.
        first_rank: of this node.
    """

    # "[rank1]:", and the "W1121 10:53:57.929000 3522 " of torch's own log lines, differ where the line does not.
    _NOISE = re.compile(rb"^\[rank\d+\]:\s?|^[IWEF]\d{4} [\d:.]+ \d+ |\b0x[0-9a-f]+\b")

    # How long a line of another rank waits for rank 0 to say the same, which may load more slowly.
    _PATIENCE = 30.0

    def __init__(self, folder: Path, first_rank: int = 0):
        self._folder, self._first_rank, self._stop = folder, first_rank, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._offsets: dict[Path, int] = {}
        self._unfinished: dict[Path, bytes] = {}
        self._waiting: list[tuple[float, int, bytes, TextIO | None]] = []
        self._gone: list[TextIO] = []
        self._seen: set[bytes] = set()

    def __enter__(self) -> "Forwarder":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()
        self._forward(last=True)

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            self._forward()

    def _write(self, target: TextIO | None, data: bytes) -> None:
        """To a stream that may be closed, or a pipe that nobody reads: the other one must still be served."""
        if target is None or target in self._gone:
            return
        try:
            target.buffer.write(data)
            target.buffer.flush()
        except (OSError, ValueError):
            self._gone.append(target)

    def _forward(self, last: bool = False) -> None:
        # stderr first: what is said on the way comes before what comes of it.
        files = sorted(self._folder.glob("**/std*.log"), key=lambda file: (int(file.parent.name), file.name))
        for file in files:
            with file.open("rb") as stream:
                stream.seek(self._offsets.get(file, 0))
                text = stream.read()
            self._offsets[file] = self._offsets.get(file, 0) + len(text)
            rank = self._first_rank + int(file.parent.name)
            target = sys.stdout if file.name == "stdout.log" else sys.stderr
            *lines, rest = (self._unfinished.get(file, b"") + text).split(b"\n")
            if last and rest:
                lines, rest = [*lines, rest], b""
            self._unfinished[file] = rest
            if rank == 0:
                self._seen.update(self._NOISE.sub(b"", line) for line in lines)
                self._write(target, text)
            else:
                self._waiting += [(time.monotonic(), rank, line, target) for line in lines if line.strip()]
        due = len(self._waiting)
        if not last:
            due = sum(since + self._PATIENCE < time.monotonic() for since, *_ in self._waiting)
        for _, rank, line, target in self._waiting[:due]:
            key = self._NOISE.sub(b"", line)
            if key not in self._seen:
                self._seen.add(key)
                self._write(target, b"[rank %d] %s\n" % (rank, line))
        del self._waiting[:due]
