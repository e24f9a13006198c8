"""What ranks say when they fail (`record`, `unsuccessful`), and which of them failed first (`root_cause`)."""

import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ErrorHandler
from torch.distributed.elastic.multiprocessing.errors import record as record_with

from . import name_ranks


class _WholeErrors(ErrorHandler):
    """A rank that the launcher ends while it writes its error leaves none: the launcher stops at half a file."""

    def record_exception(self, e: BaseException) -> None:
        extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
        _leave({"message": f"{type(e).__name__}: {e}", "extraInfo": extra})


def _leave(message: str | dict[str, Any]) -> bool:
    """Whether there is a launcher that will find it."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is not None:
        write_whole(Path(file), json.dumps({"message": message}))
    return file is not None


def write_whole(file: Path, text: str) -> None:
    """What reads it, or is left when this process is ended, is all of it, or what was there before."""
    partial = Path(f"{file}.partial")
    partial.write_text(text)
    partial.replace(file)


def record(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch's decorator of the same name, for what a rank runs: the launcher finds its error whole, or none."""
    return record_with(function, _WholeErrors())


def unsuccessful(reason: str) -> int:
    """The exit code of a rank that did its work, with bad results: why is the last line of the whole run."""
    if not _leave(reason):
        print(f"diffusers-rocm: {reason}", file=sys.stderr)
    return 1


@dataclass(frozen=True)
class Cause:
    """Why ranks ended.

    Attributes:
        text: in one line.
        is_own: whether it began here; else these ranks lost, or waited for, others.
    """

    text: str
    is_own: bool = True


# What Gloo, the store and the watchdog of NCCL (RCCL) say of a rank that waited too long, in milliseconds.
_WAITED = re.compile(rb"(?:Timed out waiting |wait timeout after |collective operation timeout.*Timeout\(ms\)=)(\d+)")
# What Gloo, and NCCL (RCCL), say of a rank that lost another.
_LOST = re.compile("[Cc]onnection (was )?(reset|closed|refused)|ncclRemoteError|remote process exited")


def root_cause(error: ChildFailedError, folder: Path, first_rank: int = 0) -> Cause:
    """What the first rank to fail said.

    Those that lost it in the middle of a collective fail after it, with an error of their own. A rank that died
    without one (killed, or ended from outside Python) went before them.

    Args:
        error: of the launcher; its failures are by global rank.
        folder: of the ranks' files: `.../attempt_N/LOCAL_RANK/stderr.log`. The last attempt counts.
        first_rank: of this node.
    """
    attempts = sorted(folder.glob("**/attempt_*"), key=lambda each: int(each.name.removeprefix("attempt_")))
    folder = attempts[-1] if attempts else folder
    errors = {first_rank + int(file.parent.name): file for file in folder.glob("*/error.json")}
    first = min(errors, key=lambda rank: errors[rank].stat().st_mtime_ns, default=None)
    found = {
        first_rank + int(file.parent.name): _WAITED.search(file.read_bytes()) for file in folder.glob("*/stderr.log")
    }
    waited = {rank: int(match[1]) / 1000 for rank, match in sorted(found.items()) if match}
    if waited and (first is None or first in waited):
        # At the launcher's SIGTERM a rank that waits ends; one that is stopped has to be killed.
        killed = [rank for rank, failure in error.failures.items() if failure.exitcode == -signal.SIGKILL]
        late = sorted(killed or found.keys() - waited.keys())
        whom = name_ranks(late) if late else "each other"
        return Cause(
            f"{name_ranks(waited)} waited {max(waited.values()):g} s for {whom}: stopped, hung, or only slow? "
            "--timeout MINUTES has all ranks wait longer",
            is_own=bool(late),
        )
    for rank, failure in sorted(error.failures.items()):
        if rank in errors or failure.exitcode == -signal.SIGTERM:
            continue
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            hint = " (out of host memory?)" if failure.exitcode == -signal.SIGKILL else ""
            return Cause(f"rank {rank} was killed by {name}{hint}")
        return Cause(f"rank {rank} failed with exit code {failure.exitcode}")
    # In the order in which they ended: the launcher ends ranks by SIGTERM too, but only after a first failure.
    ended = [rank for rank, failure in error.failures.items() if failure.exitcode == -signal.SIGTERM]
    if first is not None:
        message = json.loads(errors[first].read_text())["message"]
        if isinstance(message, str):
            return Cause(message)
        message = message["message"]
        lost = _LOST.search(message) is not None
    if ended and (first is None or lost):
        # Who lost a peer is not the cause.
        return Cause(f"rank {ended[0]} was killed by SIGTERM", is_own=False)
    return Cause(f"rank {first} failed: {message}", is_own=not lost)
