"""One rank of a probe. Run as a file, `python child.py ORDER RANK`: nothing is imported but what the probe needs.

It finds the function that the order names in its file, calls it, and writes what it returns as JSON. An alarm ends the
process some seconds after its time even where nobody is left to, and where no Python runs any more.
"""

import importlib.util
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Rank:
    """What a probe's function knows of itself.

    Attributes:
        meet: where the ranks find each other: `file:///...` or `tcp://host:port`.
        seconds: that the probe has.
        stage: says what is tried next, to be told of where it never ends.
        found: keeps what is known so far, should the rest fail.
    """

    rank: int
    world: int
    meet: str
    seconds: float
    stage: Callable[[str], None]
    found: Callable[[Any], None]


def main() -> None:
    order_file, rank = Path(sys.argv[1]), int(sys.argv[2])
    folder, order = order_file.parent, json.loads(order_file.read_text())
    sys.path[0] = order["path"]  # the package's, in place of this file's folder
    signal.alarm(int(order["seconds"]) + 10)

    def write(name: str, text: str) -> None:
        unfinished = folder / f"{name}.{rank}.unfinished"
        unfinished.write_text(text)
        unfinished.rename(folder / f"{name}.{rank}")

    code = 0
    try:
        spec = importlib.util.spec_from_file_location("probe", order["file"])
        module = importlib.util.module_from_spec(spec)
        sys.modules["probe"] = module
        spec.loader.exec_module(module)
        given = Rank(
            rank,
            order["world"],
            order["meet"],
            order["seconds"],
            lambda text: write("stage", text),
            lambda content: write("result", json.dumps(content)),
        )
        given.found(getattr(module, order["function"])(given, **order["arguments"]))
    except BaseException as error:
        traceback.print_exc()
        write("error", " ".join(f"{type(error).__name__}: {error}".split()))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of a process group that hang would keep it


if __name__ == "__main__":
    main()
