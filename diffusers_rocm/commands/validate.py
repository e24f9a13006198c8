"""`diffusers-rocm validate`: does all of it work on this machine? A report to attach to an issue or a pull request."""

import argparse
import json
import math
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..distributed.choices import Busy
from ..distributed.launching import under_torchrun
from ..doctor.finding import PROBLEM, SKIPPED
from ..doctor.privacy import without_names
from .ranks import check_writable


@dataclass(frozen=True)
class ValidateRequest:
    gpus: int
    on_gpus: bool
    out: Path


@dataclass
class Step:
    """A command of ours that says whether something works.

    Attributes:
        arguments: of `diffusers-rocm`; `JSON` stands for the file of its results, or comes on stdout without it.
        code: its exit code; None where it did not end in time.
    """

    title: str
    arguments: list[str]
    code: int | None = None
    seconds: float = 0.0
    said: str = ""
    results: Any = None

    @property
    def passed(self) -> bool:
        return self.code == 0

    @property
    def command(self) -> str:
        return shlex.join(["diffusers-rocm", *_without_file(self.arguments)])


JSON = "RESULTS.json"

# One block of each kind of models that differ in how their streams, their masks and their guidance go.
ONE_BLOCK: dict[str, list[str]] = {
    "flux": ["num_layers=1", "num_single_layers=1"],
    "qwen-image": ["num_layers=1"],
    "sd3.5-large": ["num_layers=2"],  # of which the last one is another
    "hunyuan-video": ["num_layers=1", "num_single_layers=1", "num_refiner_layers=1"],
    "wan": ["num_layers=1"],
    "ltx": ["num_layers=1"],
}
SMALL = {"hunyuan-video": ["--resolution", "144", "--frames", "5"], "wan": ["--resolution", "128", "--frames", "5"]}


def add_parser(subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser("validate", help="does all of it work on this machine? minutes, and no download")
    parser.add_argument("--gpus", type=int, help="how many to use (default: all; on a CPU 2 ranks)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPUs if there are any (ROCm: cuda)")
    parser.add_argument("--out", type=Path, default=Path("validation"), help="folder of report.md and report.json")
    parser.add_argument("--quick", action="store_true", help="pictures and one model; no benchmark")
    parser.add_argument(
        "--timeout", type=float, default=900.0, help="seconds after which a step is given up (default: %(default)g)"
    )
    return parser


def check(args: argparse.Namespace) -> ValidateRequest:
    """Raises ValueError."""
    if under_torchrun():
        raise ValueError("validate starts its own ranks: run it without torchrun, on each node")
    if args.gpus is not None and args.gpus < 1:
        raise ValueError(f"--gpus must be at least 1; got {args.gpus}")
    if not 10 <= args.timeout <= 86400:
        raise ValueError(f"--timeout must be from 10 to 86400 seconds; got {args.timeout:g}")
    count = torch.cuda.device_count()
    on_gpus = args.device != "cpu" and count > 0
    if args.device == "cuda" and not count:
        raise ValueError("--device cuda: no GPU is visible; --device cpu needs none")
    if on_gpus and (args.gpus or 1) > count:
        raise ValueError(f"--gpus {args.gpus}: {count} are visible; --device cpu needs none")
    check_writable(args.out)
    return ValidateRequest(args.gpus or (count if on_gpus else 2), on_gpus, args.out)


def meshes(world: int) -> list[str]:
    """Every product of two of the axes that share a forward, and each alone; one rank has none."""
    found = [f"{axis}={world}" for axis in ("tp", "ulysses", "ring")] if world > 1 else []
    for first, second in (("ring", "ulysses"), ("ulysses", "tp"), ("ring", "tp")):
        found += [f"{first}={size},{second}={world // size}" for size in range(2, world) if world % size == 0]
    return found + ([f"ring={world},allgather"] if world > 1 else [])


def steps(request: ValidateRequest, quick: bool) -> Iterator[Step]:
    device = ["--device", "cuda" if request.on_gpus else "cpu"]
    yield Step("What this machine is", ["env", "--json"])
    yield Step("What is wrong with it", ["doctor", "--json", "--gpus", str(request.gpus), *device])
    every = meshes(request.gpus)
    if not every:
        return
    once = ["--warmup", "1", "--repeats", "1", "--rounds", "1", "--json", JSON]
    yield Step(
        "Pictures of the embedded model, in float32",
        ["bench", "generate", "--dtype", "float32", "--seed", "0", "--repeats", "1", *device, "--json", JSON]
        + ["--mesh", *every],
    )
    # Of bfloat16 the bar that needs no float32 is looser than what docs/numerics.md promises.
    dtype = ["--dtype", *(("bfloat16", "--float32-reference") if request.on_gpus else ("float32",)), *device]
    for model, config in ONE_BLOCK.items():
        size = SMALL.get(model, ["--resolution", "256"]) + ["--text", "64"]
        mesh, guidance = list(every), []
        if model == "flux":
            mesh += [f"{axis}={request.gpus},int8" for axis in ("tp", "ulysses", "ring")]
            if request.on_gpus:
                size[1] = str(hopping_resolution(request.gpus))
        elif model == "wan":
            guidance = ["--guidance"]
            mesh += [f"cfg=2,ulysses={request.gpus // 2}"] if request.gpus % 2 == 0 else []
        yield Step(
            f"Tensors of {model}, one block of its real width",
            ["bench", "step", "--model", model, "--config", *config, *size, *dtype, *guidance, *once, "--mesh", *mesh],
        )
        if quick:
            return
    if request.on_gpus:
        yield Step(
            "Speed: a step of 4 and 8 blocks of FLUX.1-dev's width",
            ["bench", "step", "--config", "num_layers=4", "num_single_layers=8", "--mode", "eager", "compile"]
            + ["--repeats", "5", "--json", JSON, "--mesh", *every],
        )
        yield Step("Speed: the collectives of a whole step", ["bench", "comm", "--json", JSON, "--mesh", *every])


def hopping_resolution(gpus: int) -> int:
    """Of a picture of FLUX.1, of 24 heads of 128: shorter ones a ring of so many GPUs gathers, and does not hop."""
    tokens = gpus * math.ceil(math.sqrt(Busy.of_gpu(sys.maxsize).products / (24 * 128)))
    return 16 * math.ceil(math.sqrt(tokens))


def run(request: ValidateRequest, args: argparse.Namespace, argv: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the step that runs ends too
    done: list[Step] = []
    report = request.out / "report"
    for step in steps(request, args.quick):
        print(f"{step.title} ...", end=" ", flush=True)
        _take(step, args.timeout)
        done.append(step)
        print(f"{_verdict(step)}, {step.seconds:.0f} s", flush=True)
        if not step.passed:
            told = _told(step)
            causes = [line for line in told if line.startswith(PROBLEM)] or told[-1:]
            print("", step.command, *causes, sep="\n  ", flush=True)
        # After each: a machine that hangs leaves a report of what came before.
        report.with_suffix(".json").write_text(json.dumps([asdict(each) for each in done], indent=1) + "\n")
        report.with_suffix(".md").write_text(_markdown(request, done))
    failed = [step for step in done if not step.passed]
    print(
        f"{len(done) - len(failed)} of {len(done)} passed: {report.with_suffix('.md')}, {report.with_suffix('.json')}"
    )
    return 1 if failed else 0


def _verdict(step: Step) -> str:
    if step.code is None:
        return "did not end"
    return "passed" if step.passed else f"FAILED (exit code {step.code})"


def _take(step: Step, seconds: float) -> None:
    """Run it in a process of its own: what brings one down does not hide those after it."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="diffusers_rocm_") as folder:
        file = Path(folder, "results.json")
        words = [str(file) if word == JSON else word for word in step.arguments]
        command = [sys.executable, "-m", "diffusers_rocm", *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                output, errors = process.communicate(timeout=seconds)
                step.code = process.returncode
            except subprocess.TimeoutExpired:
                output, errors = _end(process)
            except BaseException:
                _end(process)
                raise
        in_file = file.exists()
        step.results = _parsed(file.read_text() if in_file else output)
        shown = output if in_file or step.results is None else ""
        step.said = without_names(shown if step.passed else f"{shown}\n{errors[-4000:]}").strip()
    step.seconds = time.monotonic() - start


def _end(process: subprocess.Popen) -> tuple[str, str]:
    """End a step, and with it its ranks; what it said."""
    process.terminate()
    try:
        return process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def _without_file(words: list[str]) -> list[str]:
    at = words.index(JSON) if JSON in words else None
    return words if at is None else [*words[: at - 1], *words[at + 1 :]]


def _markdown(request: ValidateRequest, done: list[Step]) -> str:
    """The report: a line for each step, then what each printed."""
    env = done[0].results or {}
    packages = env.get("packages", {})
    gpus = ", ".join(dict.fromkeys(f"{gpu['name']} ({gpu['architecture']})" for gpu in env.get("gpus", [])))
    versions = [f"{name} {packages[name]}" for name in ("torch", "diffusers", "diffusers_rocm") if name in packages]
    lines = [
        "# diffusers-rocm validate",
        "",
        f"{request.gpus} x {gpus if request.on_gpus else 'CPU'}; {env.get('torch build')}; {', '.join(versions)}",
        "",
        "| | result | s |",
        "|---|---|---|",
        *(f"| {step.title} | {_verdict(step)} | {step.seconds:.0f} |" for step in done),
    ]
    for step in done:
        lines += ["", f"## {step.title}", "", f"`{step.command}`", "", "```", *_told(step), "```"]
    return "\n".join(lines) + "\n"


def _told(step: Step) -> list[str]:
    said = step.said.splitlines()
    if step.results is None or JSON in step.arguments:  # what is in a file is said as well
        return said
    if "findings" in step.results:
        return said + [
            f"{each['status']:8} {each['name']:22} {each['seen']}" + (f"; fix: {each['fix']}" if each["fix"] else "")
            for each in step.results["findings"]
            if each["status"] != SKIPPED
        ]
    return said + json.dumps(step.results, indent=1).splitlines()
