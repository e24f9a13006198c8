"""Tables of several runs of `diffusers-rocm bench step`: what was aimed at, and ours beside the others."""

import itertools
import json
import re
import statistics
from pathlib import Path


RUNS = Path(__file__).parent.parent / "docs" / "benchmarks"


def read(name: str) -> dict:
    return json.loads((RUNS / f"{name}.json").read_text())


# What was aimed at: of which runs, of those that a machine has, by which rows, and how far over one rank.
P2P_OFF = ("step_flux_graphs_{}_p2p_off",)
AIMS = (
    ("1024x1024, exact, compiled", ("step_flux_graphs_{}",), "", 3.3),
    ("1024x1024, `tp=4`, compiled", ("step_flux_graphs_{}",), "tp=4", 2.9),
    ("1024x1024, `tp=2,ulysses=2`, compiled", ("step_flux_graphs_{}",), "tp=2,ulysses=2", 2.9),
    ("1024x1024, exact, not compiled", ("step_flux_eager_graphs_{}",), "", 2.9),
    ("2048x2048, exact, compiled", ("step_flux_2048_graphs_{}",), "", 3.7),
    ("1024x1024, P2P off, exact", P2P_OFF, "", 1.8),
    ("1024x1024, P2P off, Ulysses in 8 bits", P2P_OFF, "ulysses=4,8 bits", 2.2),
    ("1024x1024, P2P off, `tp=4` in 8 bits", P2P_OFF, "tp=4,8 bits", 1.4),
)
# The ring's time over that of diffusers' ring, of the same run.
RING_AIMS = (
    ("66,048 tokens, NVLink", "step_flux_65k_{}", 0.95),
    ("66,048 tokens, P2P off", "step_flux_65k_{}_p2p_off", 0.7),
)
PEERS = "diffusers", "cache-dit"
EIGHT_BITS = re.compile("int8|float8")


def aims(machine: str) -> str:
    """The best of ours and the best of the others, over one rank in the same mode, beside what was aimed at."""
    lines = ["| over one GPU in the same mode | aim | ours | met | best of the others |", "|---|---|---|---|---|"]
    for shown, files, mesh, aim in AIMS:
        rows = [row for name in files for row in had(name.format(machine))]
        best = []
        for whose in (("",), PEERS):
            of = [row for row in rows if row["name"].rpartition(" ")[0] in whose and row["name"] != "one rank"]
            of = [row for row in of if "float8" not in row["name"]]  # wrong, in every run that compares with float32
            fitting = [row for row in of if fits(mesh_of(row), mesh)]
            exact = [row for row in of if mesh_of(row) == mesh.partition(",8 bits")[0]]
            best.append(max(fitting or exact, key=lambda row: row["speedup"]))
        cells = [
            f"{row['speedup']:.2f}x (`{row['name']}`, {row['mode']}, {max(row['peak']) / 2**30:.1f} GiB)"
            for row in best
        ]
        met = "yes" if best[0]["speedup"] >= aim else "no"
        lines.append(f"| {shown} | {aim}x | {cells[0]} | {met} | {cells[1]} |")
    lines += [
        "",
        "| a ring's time over that of diffusers' ring | aim | ours | met | memory of both, GiB |",
        "|---|---|---|---|---|",
    ]
    for shown, file, aim in RING_AIMS:
        rows = {row["name"]: row for row in had(file.format(machine))}
        theirs = rows["diffusers ring=4"]
        ours = min((rows[name] for name in rows if name.startswith("ring=4")), key=lambda row: row["ms"])
        ratio = ours["ms"] / theirs["ms"]
        memory = " and ".join(f"{max(row['peak']) / 2**30:.2f}" for row in (ours, theirs))
        met = "yes" if ratio <= aim else "no"
        lines.append(f"| {shown} | {aim} | {ratio:.3f} (`{ours['name']}`) | {met} | {memory} |")
    patterns = dict.fromkeys(name for _, of, *_ in AIMS for name in of) | dict.fromkeys(of for _, of, _ in RING_AIMS)
    files = [file for name in patterns if (file := RUNS / f"{name.format(machine)}.json").exists()]
    gpus = {gpu["name"] for file in files for gpu in read(file.stem)["environment"]["gpus"]}
    dates = {file: read(file.stem)["environment"].get("date") for file in files}
    named = ", ".join(f"`{file.name}`" + f" ({dates[file]})" * (dates[file] is not None) for file in files)
    return "\n".join([*lines, "", f"4 x {', '.join(gpus)}, by the commands in {named} (`docs/benchmarks/`)."])


# What is near its aim, and was measured by the same code on two machines: of which runs, and of what over what.
NEAR = (
    ("`ulysses=4`, 1024x1024", "step_flux_graphs_4xh200", "one rank", "ulysses=4", "3.3x"),
    ("`tp=4`, 1024x1024", "step_flux_graphs_4xh200", "one rank", "tp=4", "2.9x"),
    ("`tp=2,ulysses=2`, 1024x1024", "step_flux_graphs_4xh200", "one rank", "tp=2,ulysses=2", "2.9x"),
    ("`ulysses=4`, 2048x2048", "step_flux_2048_graphs_4xh200", "one rank", "ulysses=4", "3.7x"),
    ("`ring=4`, 66,048 tokens, of diffusers' time", "step_flux_65k_4xh200", "ring=4", "diffusers ring=4", "0.95"),
)


def two_machines() -> str:
    """How far what is met and missed by little differs between machines."""
    columns = ["over one GPU", "aim"]
    for where in ("in the table", "on another machine"):
        columns += [where, "of least times", "the others' best"]
    lines, ran = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"], []
    for shown, file, above, below, aim in NEAR:
        cells = []
        for name in (file, f"{file}_once"):
            times = {row["name"]: row["milliseconds"] for row in had(name)}
            for of in (statistics.median, min):
                ratio = of(times[above]) / of(times[below])
                cells.append(f"{ratio:.2f}x" if aim.endswith("x") else f"{ratio:.3f}")
            others = [
                statistics.median(times[way]) for peer in PEERS for way in ways(f"{peer} {below}") if way in times
            ]
            cells.append(f"{statistics.median(times[above]) / min(others):.2f}x" if others else "-")
        lines.append(f"| {shown} | {aim} | {' | '.join(cells)} |")
        ran += [f"`{name}.json`" for name in (file, f"{file}_once") if f"`{name}.json`" not in ran]
    return "\n".join([*lines, "", f"4 x NVIDIA H200, by the commands in {', '.join(ran)} (`docs/benchmarks/`)."])


# Where the others were replayed too: sizes, mode, meshes, and runs of three machines of four GPUs.
REPLAYED = (
    (
        "1024x1024, compiled",
        "compile+graph",
        ("ulysses=4", "ring=4", "tp=4", "tp=2,ulysses=2"),
        ("step_flux_graphs_4xh100", "step_flux_graphs_4xh200", "step_flux_4xh200"),
    ),
    (
        "1024x1024, not compiled",
        "graph",
        ("ulysses=4", "ring=4", "tp=4"),
        ("step_flux_eager_graphs_4xh100", "step_flux_eager_graphs_4xh200", "step_flux_eager_4xh200"),
    ),
    (
        "2048x2048, compiled",
        "compile+graph",
        ("ulysses=4", "ring=4"),
        ("step_flux_2048_graphs_4xh100", "step_flux_2048_graphs_4xh200", "step_flux_2048_4xh200"),
    ),
    (
        "1024x1024, compiled, P2P off",
        "compile+graph",
        ("ulysses=4", "ring=4", "tp=4"),
        (
            "step_flux_graphs_4xh100_p2p_off",
            "step_flux_graphs_4xh200_p2p_off",
            "step_flux_graphs_4xh200_p2p_off_before",
        ),
    ),
)


def replayed() -> str:
    """Ours and the best of the others of the same mesh, as graphs, in every run that has both."""
    lines = ["| as graphs | | 4 H100 | 4 H200 | 4 H200, earlier |", "|---|---|---|---|---|"]
    for shown, mode, meshes, files in REPLAYED:
        runs = [{row["name"]: row["ms"] for row in had(name) if row["mode"] == mode} for name in files]
        for mesh in meshes:
            cells = []
            for times in runs:
                others = [times[name] for peer in PEERS for name in ways(f"{peer} {mesh}") if name in times]
                ahead = f"{min(others):.1f}: {100 * (min(others) / times[mesh] - 1):.0f} %" if others else "-"
                cells.append(f"{times[mesh]:.1f}, {ahead}")
            lines.append(f"| {shown} | `{mesh}` | {' | '.join(cells + [''] * (3 - len(cells)))} |")
    return "\n".join(lines)


def slow_links() -> str:
    """How much faster than one GPU two and four are at 1024x1024 without P2P, by how messages go."""
    ways = {
        "2, by copies": (2, "step_flux_graphs_2xh200_p2p_off"),
        "4, by copies": (4, "step_flux_graphs_4xh200_p2p_off"),
        "2, by the process group": (2, "step_flux_graphs_2xh200_p2p_off_by_group"),
        "4, by the process group": (4, "step_flux_graphs_4xh200_p2p_off_by_group"),
        "4, by it, as they come": (4, "step_flux_graphs_4xh200_p2p_off_before"),
        "4, compiled, no graph": (4, "step_flux_4xh200_p2p_off"),
    }
    found = {how: {row["name"]: row["speedup"] for row in read(file)["rows"]} for how, (_, file) in ways.items()}
    lines = [f"| GPUs | {' | '.join(ways)} |", "|---|" + "---|" * len(ways)]
    for axis, communication in itertools.product(("ulysses", "ring", "tp"), ("", ",int8")):
        cells = [f"{found[how][f'{axis}={count}{communication}']:.2f}x" for how, (count, _) in ways.items()]
        lines.append(f"| `{axis}`{', int8' if communication else ''} | {' | '.join(cells)} |")
    files = ", ".join(f"`{file}.json`" for _, file in ways.values())
    return "\n".join([*lines, "", f"NVIDIA H200 without P2P, by the commands in {files} (`docs/benchmarks/`)."])


def had(name: str) -> list[dict]:
    """The rows of a run that have times; none of one that there is not."""
    return [row for row in read(name)["rows"] if not row["note"]] if (RUNS / f"{name}.json").exists() else []


def ways(name: str) -> tuple[str, ...]:
    """The rows of a mesh: cache-dit's Ulysses is there in two ways."""
    return name, f"{name},async"


def mesh_of(row: dict) -> str:
    return row["name"].rpartition(" ")[2].removesuffix(",async")


def fits(name: str, mesh: str) -> bool:
    """Whether a row is of the mesh, where 8 bits may be of either kind; without a mesh, whether it is exact."""
    return EIGHT_BITS.sub("8 bits", name) == mesh if mesh else not EIGHT_BITS.search(name)
