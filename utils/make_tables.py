"""Write the tables of README.md and docs/ from the runs in docs/benchmarks/."""

import argparse
import re
import statistics
import sys
from pathlib import Path

import torch
from compare_runs import aims, read, replayed, slow_links, two_machines
from diffusers import FluxTransformer2DModel

from diffusers_rocm import verify_plan


ROOT = Path(__file__).parent.parent


def without_p2p(environment: dict[str, str]) -> str:
    """What comes before the command of a run that had none."""
    return "NCCL_P2P_DISABLE=1 " if environment.get("NCCL_P2P_DISABLE") == "1" else ""


def source(command: str, versions: dict[str, str], files: str) -> str:
    """What was run on GPUs, on which and with which versions, and where its figures are."""
    ranks = versions["device"].split()[0]
    also = ", and with `NCCL_P2P_DISABLE=1`" if files.endswith("*") else ""
    return (
        f"`{without_p2p(versions)}torchrun --nproc_per_node={ranks} {command}`{also}; {versions['device']}, "
        f"torch {versions['torch']}, diffusers {versions['diffusers']}, NCCL {versions['nccl']} "
        f"(`docs/benchmarks/{files}.json`)."
    )


def collectives() -> str:
    runs = [read(name) for name in ("collectives_4xh200", "collectives_4xh200_p2p_off")]
    nvlink, host = (run["microseconds"] for run in runs)
    lines = ["| | NVLink | P2P off |", "|---|---|---|"]
    lines += [f"| {name} | {nvlink[name]:.0f} | {host[name]:.0f} |" for name in nvlink]
    ran = source("utils/bench_collectives.py", runs[0]["versions"], "collectives_4xh200*")
    return "\n".join([*lines, "", ran])


def hops() -> str:
    """One hop of the ring, two ways."""
    lines = ["| | NVLink | P2P off | of the host |", "|---|---|---|---|"]
    nvlink, slow = (read(name) for name in ("collectives_2xh200", "collectives_2xh200_p2p_off"))
    for name in ("hop, as an all-to-all", "hop, isend and irecv"):
        of_host = f"{nvlink['host_microseconds'][name]:.0f}, {slow['host_microseconds'][name]:.0f}"
        lines.append(f"| {name} | {nvlink['microseconds'][name]:.0f} | {slow['microseconds'][name]:.0f} | {of_host} |")
    ran = source("utils/bench_collectives.py", nvlink["versions"], "collectives_2xh200*")
    return "\n".join([*lines, "", ran])


def ways_to_attend() -> str:
    """One attention by each schedule, over fast links and over slow ones."""
    runs = [read(name) for name in ("attention_2xh100", "attention_2xh100_p2p_off")]
    ways = "Ulysses, at once", "Ulysses, in groups", "ring, p2p", "ring, allgather"
    lines = [f"| tokens | links | {' | '.join(ways)} |", "|---|---|" + "---|" * len(ways)]
    for tokens in runs[0]["milliseconds"]:
        for links, run in zip(("NVLink", "P2P off"), runs, strict=True):
            figures = " | ".join(f"{run['milliseconds'][tokens][way]:.2f}" for way in ways)
            lines.append(f"| {tokens} | {links} | {figures} |")
    command = f"utils/bench_attention.py --tokens {' '.join(runs[0]['milliseconds'])}"
    return "\n".join([*lines, "", source(command, runs[0]["versions"], "attention_2xh100*")])


def side_by_side() -> str:
    """A message and a product that does not wait for it, and a sum in parts under its product."""
    runs = [read(name) for name in ("overlap_2xh100", "overlap_4xh200", "overlap_2xh100_p2p_off")]
    rows = {
        "message of Ulysses, 1152 tokens": "ulysses 1152, NCCL: message",
        "product of the MLP": "ulysses 1152, NCCL: product",
        "one after the other": "ulysses 1152, NCCL: one after the other",
        "side by side": "ulysses 1152, NCCL: side by side",
        "side by side, 32 multiprocessors left free": "ulysses 1152, NCCL: side by side, 32 left free",
        "the message by copies out of symmetric memory": "ulysses 1152, copies: message",
        "so, side by side": "ulysses 1152, copies: side by side",
        "row product of 4608 tokens": "sum 4608: product",
        "its sum": "sum 4608: NCCL",
        "its sum as a reduce-scatter and a gather": "sum 4608: reduce-scatter, all-gather",
        "its sum by torch's one-shot": "sum 4608: one-shot",
        "its sum by torch's two-shot": "sum 4608: two-shot",
        "product, then sum": "sum 4608: product, NCCL",
        "in 2 parts, side by side": "sum 4608: product, NCCL in 2 parts side by side",
        "in 4 parts, side by side": "sum 4608: product, NCCL in 4 parts side by side",
    }
    lines = ["| microseconds | 2 GPUs, NVLink | 4 GPUs, NVLink | 2 GPUs, P2P off |", "|---|---|---|---|"]
    for shown, name in rows.items():
        figures = [run["microseconds"].get(name) for run in runs]
        lines.append(f"| {shown} | {' | '.join('' if each is None else f'{each:.0f}' for each in figures)} |")
    ran = [
        source("utils/bench_overlap.py", runs[0]["versions"], "overlap_2xh100*"),
        source("utils/bench_overlap.py --rows 1152", runs[1]["versions"], "overlap_4xh200"),
    ]
    return "\n".join([*lines, "", *ran])


def flux_bytes() -> str:
    """From the plan and the real config, on the meta device."""
    with torch.device("meta"):
        model = FluxTransformer2DModel(guidance_embeds=True)
    lines = ["| `tp` | GB a rank | an even share | replicated, of it |", "|---|---|---|---|"]
    for tp in (1, 2, 3, 4, 5, 8, 24):
        report = verify_plan(model, tp)
        halved = [size / 2e9 for size in (max(report.rank_bytes), report.full_bytes / tp, report.replicated_bytes)]
        lines.append("| {} | {:.2f} | {:.2f} | {:.2f} |".format(tp, *halved if tp > 1 else (*halved[:2], 0)))
    return "\n".join(lines)


def features() -> str:
    """What can be had together."""
    run, of_gpus = read("features"), read("features_gpus")
    meshes = run["meshes"]
    lines = [f"| | {' | '.join(meshes)} | `save_pretrained` | `disable_parallelism` |", "|---|" + "---|" * 5]
    for row in run["rows"] + of_gpus["rows"]:
        of_rounding = "{:.2f} of the rounding" if row["rounds"] else "{:.1e}"
        cells = [
            "an error" if row.get(mesh, 0) is None else of_rounding.format(row[mesh]) if mesh in row else "not run"
            for mesh in meshes
        ]
        for of in ("unsaved", "not_whole"):
            where = row.get(of, [])
            only = "" if where == meshes else f" ({', '.join(where)})"
            cells.append("" if row["of_pipeline"] else f"an error{only}" if where else "right")
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    cpu, gpus = (", ".join(f"{name} {each}" for name, each in of["versions"].items()) for of in (run, of_gpus))
    ran = (
        f"`python utils/run_features.py`; CPU, Gloo, {cpu} (`docs/benchmarks/features.json`). The last rows: with "
        f"`--gpus`, in bfloat16, {gpus} (`features_gpus.json`)."
    )
    return "\n".join([*lines, "", ran])


def memory(*names: str, also: str) -> str:
    """Peaks of the stages of a pipeline, of the rank that has the most."""
    stages = ("load", "encode", "denoise", "decode")
    runs = [read(f"memory_{name}") for name in names]
    checked = all("distance" in run for run in runs)  # older ones are not
    columns = "weights", "offload", *stages, "host, at most", *["relative L2 to one rank"] * checked
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for run in runs:
        peaks = [max(run["peaks"][stage]["device"]) for stage in stages]
        peaks.append(max(size for of in run["peaks"].values() for size in of["host"]))
        figures = " | ".join(f"{peak / 2**30:.2f}" for peak in peaks)
        figures += f" | {run['distance']:.1e}" if checked else ""
        lines.append(f"| {run['request']['quantization'] or 'bf16'} | {run['request']['offload']} | {figures} |")
    command = (
        f"diffusers-rocm bench memory --write-random-flux --model FOLDER --tp {run['mesh']['tp']} --height 1024 "
        "--width 1024 --max-sequence-length 512 --steps 3 "
        "--text-encoders shard --vae tile --vae-tiling --offload model"
    )
    versions, files = run["versions"], ", ".join(f"`memory_{name}.json`" for name in names)
    ran = (
        f"`{command}`, also with {also}; {run['mesh']['tp']} x {run['device']}, "
        f"torch {versions['torch']}, diffusers {versions['diffusers']} ({files} in docs/benchmarks)."
    )
    return "\n".join([*lines, "", ran])


def loading(name: str) -> str:
    """What a rank's process grows by while a pipeline is loaded, beside the weights that it keeps."""
    run = read(f"memory_{name}")
    start, load = (run["peaks"][stage]["host"] for stage in ("start", "load"))
    columns = "weights kept", "largest tensor", "before", "while loading", "at most allowed"
    lines = [f"| rank | {' | '.join(columns)} |", "|---|" + "---|" * 5]
    for rank, (kept, largest, before, peak) in enumerate(
        zip(run["weights"], run["largest_tensor"], start, load, strict=True)
    ):
        allowed = before + kept + largest + 300e6
        assert peak <= allowed, (peak, allowed)
        figures = " | ".join(f"{size / 2**30:.2f}" for size in (kept, largest, before, peak, allowed))
        lines.append(f"| {rank} | {figures} |")
    versions = run["versions"]
    ran = (
        f"`diffusers-rocm bench memory --write-random-flux --model FOLDER --tp {run['mesh']['tp']} --device cpu "
        "--dtype bfloat16 --height 128 --width 128 --max-sequence-length 64 --steps 1 --text-encoders shard "
        f"--vae first-rank --offload none`; relative L2 to one rank {run['distance']:.1e}, torch {versions['torch']}, "
        f"diffusers {versions['diffusers']} "
        f"(`memory_{name}.json` in docs/benchmarks)."
    )
    return "\n".join([*lines, "", ran])


def steps(name: str, modes: tuple[str, ...] = (), without: str = "") -> str:
    """All rows of a run of `diffusers-rocm bench step`, or those in the modes named, and without one of a name."""
    run = read(name)
    reference = "float32" if run["request"].get("in_float32") else "one rank"
    lines = [
        f"| | mode | ms a step (least to most) | over one rank | peak GiB a rank | relative L2 to {reference} |",
        "|---|---|" + "---|" * 4,
    ]
    for row in run["rows"]:
        if modes and row["mode"] not in modes or row["name"] == without:
            continue
        if row["note"]:
            figures = f"{row['note']} | | | "
        else:
            peak = max(row["peak"]) / 2**30
            times = f"{row['ms']:.1f} ({min(row['milliseconds']):.1f} to {max(row['milliseconds']):.1f})"
            figures = f"{times} | {row['speedup']:.2f}x | {peak:.2f} | {row['distance']:.1e}"
        lines.append(f"| {row['name']} | {row['mode']} | {figures} |")
    return "\n".join([*lines, "", ran_on(run, name)])


def messages() -> str:
    """Steps with one message an attention for queries, keys and values, and with three."""
    links = {"NVLink": "2xh200", "P2P off": "2xh200_p2p_off"}
    lines = ["| links | mode | one message | three |", "|---|---|---|---|"]
    for name, where in links.items():
        one, three = (read(f"step_flux_{count}_{where}")["rows"] for count in ("one_message", "three_messages"))
        for row, other in zip(one, three, strict=True):
            if row["name"] != "one rank":
                lines.append(f"| {name} | {row['mode']} | {row['ms']:.1f} | {other['ms']:.1f} |")
    names = "step_flux_one_message_2xh200", "step_flux_three_messages_2xh200"
    return "\n".join(
        [*lines, "", ran_on(read(names[0]), names[0]), f"The others: `{names[1]}.json`, `*_p2p_off.json`."]
    )


def ran_on(run: dict, file: str) -> str:
    """The command of a run of `diffusers-rocm bench`, and where it was."""
    found = run["environment"]
    names = [name for name in ("torch", "diffusers", "cache-dit") if name in found["packages"]]
    versions = ", ".join([*(f"{name} {found['packages'][name]}" for name in names), found["collectives"][-1]])
    gpus = f"{len(found['gpus'])} x {found['gpus'][0]['name']}"
    command = without_p2p(found["environment"]) + run["command"]
    return f"`{command}`; {gpus}, {versions} (`docs/benchmarks/{file}.json`)."


def pictures(name: str) -> str:
    """The stages of a run of `diffusers-rocm bench generate`."""
    run, stages = read(name), ("load", "encode", "denoise", "decode")
    columns = *(f"{stage}, s" for stage in stages), "a picture, s", "over one rank", "relative L2 of a forward"
    lines = [f"| | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for row in run["rows"]:
        times = " | ".join(f"{statistics.median(row['times'][stage]):.2f}" for stage in stages)
        over = run["rows"][0]["picture"] / row["picture"]
        lines.append(f"| {row['mesh']} | {times} | {row['picture']:.2f} | {over:.2f}x | {row['forward']:.1e} |")
    return "\n".join([*lines, "", ran_on(run, name)])


def sent_in_a_step() -> str:
    """The collectives of runs of `diffusers-rocm bench comm` that take the most, by mesh."""
    columns = "links", "mesh", "collective", "MB a rank", "a step", "microseconds", "GB/s", "ms a step"
    lines, ran = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"], []
    for links, name in (("NVLink", "comm_flux_2xh200"), ("P2P off", "comm_flux_2xh200_p2p_off")):
        run = read(name)
        for of_mesh in run["meshes"]:
            for each in of_mesh["collectives"]:
                size, time = max(each["sent"]), each["median"]
                of_step = each["calls"] * time / 1e3
                if of_step >= 0.1:
                    called = f"{each['axis']} {each['name']} | {size / 1e6:.1f} | {each['calls']}"
                    figures = f"{time:.0f} | {size / time / 1e3:.0f} | {of_step:.1f}"
                    lines.append(f"| {links} | {of_mesh['mesh']} | {called} | {figures} |")
        ran.append(ran_on(run, name))
    return "\n".join([*lines, "", *ran])


def profiled(run: dict) -> str:
    """Which step was, where it is not the last of several."""
    after_a_rest = run["versions"].get("date", "") < "2026-11-28"
    return " The step that is profiled came after a rest." if after_a_rest else ""


def alone(name: str) -> str:
    """What a rank computes, by kinds of kernels, beside one rank's."""
    run = read(name)
    columns = "ms a step", "of one rank", "products", "attention", "other", "between kernels"
    lines = [f"| | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for row in run["rows"]:
        kinds = [row[kind] for kind in ("matmul", "attention", "other")]
        figures = " | ".join(f"{each:.1f}" for each in (*kinds, row["ms"] - sum(kinds)))
        lines.append(f"| {row['mesh']} | {row['ms']:.1f} | {run['rows'][0]['ms'] / row['ms']:.2f}x | {figures} |")
    versions = run["versions"]
    ran = (
        f"`python {run['command']}`; {versions['device']}, torch {versions['torch']}, diffusers "
        f"{versions['diffusers']} (`docs/benchmarks/{name}.json`).{profiled(run)}"
    )
    return "\n".join([*lines, "", ran])


def kernels(*names: str) -> str:
    """Where the time of a step of several ranks goes, of one run or more."""
    computing = "products", "attention", "other", "nothing computed"
    columns = "ms a step", *computing, "messages", "waiting", "hidden of both"
    lines = [f"| | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    ran = []
    for name in names:
        run = read(name)
        how = re.findall(r"--(?:model|wait) (\S+)", run["command"])
        how += [f"{side}x{side}" for side in re.findall(r"--resolution (\d+)", run["command"])]
        how += ["by the process group"] * ("--process-group" in run["command"])
        how += ["P2P off"] * (run["versions"]["NCCL_P2P_DISABLE"] == "1")
        how += ["with memsets"] * ("--memsets" in run["command"])
        how += ["gelu apart"] * ("--gelu-apart" in run["command"])
        for row in run["rows"]:
            computed = [row[kind] for kind in ("matmul", "attention", "other")]
            cells = [row["ms"], *computed, row["ms"] - sum(computed)]
            cells += [row["messages"], row.get("waiting", 0.0), row["hidden"]]
            cells = [max(0.0, each) for each in cells]  # what rounding makes negative
            lines.append(f"| {', '.join([row['mesh'], *how])} | {' | '.join(f'{each:.1f}' for each in cells)} |")
        ran.append(source(run["command"], run["versions"], name) + profiled(run))
    return "\n".join([*lines, "", *ran])


def host_memory() -> str:
    run = read("host_memory_4xh200_p2p_off")
    ways = run["microseconds"]
    lines = [f"| | {' | '.join(ways)} |", "|---" * (1 + len(ways)) + "|"]
    for message in run["bytes"]:
        lines.append(f"| {message} | {' | '.join(f'{times[message]:.0f}' for times in ways.values())} |")
    command = "utils/bench_host_memory.py --slots 4 8 --kib 1024 2048"
    return "\n".join([*lines, "", source(command, run["versions"], "host_memory_4xh200_p2p_off")])


def guard() -> str:
    columns = "GPUs", "`rank_check`", "ms a step", "sharing latents and comparing", "of them comparing"
    lines, ran = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"], []
    for name in ("guard_2xh200", "guard_4xh200"):
        run = read(name)
        arguments = run["arguments"]
        sharing = next(row["guard_ms"] for row in run["rows"] if row["rank_check"] == "off")
        for row in run["rows"]:
            comparing = row["guard_ms"] - sharing
            cells = f"{row['ms']:.1f} | {row['guard_ms']:.2f} | {comparing:.2f} ({comparing / row['ms']:.2%})"
            lines.append(f'| {arguments["tp"]} | `"{row["rank_check"]}"` | {cells} |')
        command = f"utils/bench_guard.py --tp {arguments['tp']} --compile --repeats {arguments['repeats']}"
        ran.append(source(command, run["versions"], name))
    return "\n".join([*lines, "", *ran])


def radeon() -> str:
    """The best mesh by cards, as `diffusers-rocm plan` predicts it, and how far over one card."""
    found: dict[str, dict[str, str]] = {}
    for planned in (ROOT / "docs" / "examples" / "plan_flux_radeon.txt").read_text().split("$ ")[1:]:
        count, card, memory = re.search(r"^(\d) x (.+) \(speed assumed .* with (\d+)\.0 GB", planned, re.M).groups()
        (speedup,) = re.search(r"^\w+=.* ([\d.]+x) ", planned, re.M).groups()
        (options,) = re.search(r"^diffusers-rocm generate --model \S+ (.+) --compile", planned, re.M).groups()
        found.setdefault(f"{card}, {memory} GB", {})[count] = f"`{options}`, {speedup}"
    lines = [f"| cards | {' | '.join(found)} |", "|---" * (1 + len(found)) + "|"]
    lines += [f"| {count} | {' | '.join(of[count] for of in found.values())} |" for count in "2345"]
    return "\n".join(lines)


TABLES = {
    "host_memory": host_memory,
    "flux_bytes": flux_bytes,
    "collectives": collectives,
    "features": features,
    "guard": guard,
    "hops": hops,
    "memory": lambda: memory(
        "bf16_4xh200",
        "int8_4xh200",
        "int8_group_4xh200",
        also="`--quantization int8`, and with that and `--offload group`",
    ),
    "ways_to_attend": ways_to_attend,
    "side_by_side": side_by_side,
    "messages": messages,
    "sent_in_a_step": sent_in_a_step,
    "alone_flux_1024": lambda: alone("alone_flux_1024_1xh200"),
    "alone_flux_1024_eager": lambda: alone("alone_flux_1024_eager_1xh100"),
    "kernels_flux_1024": lambda: kernels("kernels_flux_1024_4xh200"),
    "kernels_graphs": lambda: kernels("kernels_graphs_4xh200"),
    "kernels_65k": lambda: kernels("kernels_65k_4xh200"),
    "alone_65k": lambda: alone("alone_flux_65k_1xh200"),
    "kernels_wait": lambda: kernels("kernels_wait_at_once_4xh200", "kernels_wait_late_4xh200"),
    "kernels_wait_p2p_off": lambda: kernels("kernels_wait_at_once_4xh200_p2p_off", "kernels_wait_late_4xh200_p2p_off"),
    "kernels_wait_2xh100": lambda: kernels("kernels_wait_at_once_2xh100", "kernels_wait_late_2xh100"),
    "kernels_tp_p2p_off": lambda: kernels("kernels_tp_at_once_2xh100_p2p_off", "kernels_tp_late_2xh100_p2p_off"),
    "replayed": replayed,
    "slow_links": slow_links,
    "aims_4xh100": lambda: aims("4xh100"),
    "aims_4xh200": lambda: aims("4xh200"),
    "two_machines": two_machines,
    "radeon": radeon,
    "kernels_copies": lambda: kernels("kernels_copies_4xh100", "kernels_group_4xh100", "kernels_2048_4xh100"),
    "kernels_gelu": lambda: kernels("kernels_gelu_apart_2xh200", "kernels_gelu_fused_2xh200"),
    "kernels_memsets": lambda: kernels(
        *(f"kernels_{how}_memsets_2xh200{links}" for links in ("", "_p2p_off") for how in ("with", "without"))
    ),
    "kernels_slices": lambda: kernels(
        "kernels_slices_4xh200",
        *(f"kernels_{how}_{model}_2xh200" for model in ("wan", "flux2") for how in ("slices", "sums")),
    ),
    "generate_flux_2xh200": lambda: pictures("generate_flux_2xh200"),
    "step_qwen_image": lambda: steps("step_qwen_image_2xh100", ("compile",)),
    # Whose time was that of a rank beside it, which waited on one of its GPUs.
    "step_flux_graphs_2xh200": lambda: steps("step_flux_graphs_2xh200", without="device-map"),
    "loading": lambda: loading("load_bf16_cpu"),
    "memory_two_ranks": lambda: memory(
        *(f"{name}_2xh200" for name in ("bf16", "bf16_disk", "int8", "int8_group")),
        also="`--offload disk`, with `--quantization int8`, and with that and `--offload group`",
    ),
}


def table(name: str) -> str:
    """A table of its own, or that of the run of `bench step` of this name."""
    return TABLES[name]() if name in TABLES else steps(name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a table is not up to date")
    check = parser.parse_args().check
    stale = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        old = page.read_text()
        new = re.sub(
            r"<!-- table: (\w+) -->\n.*?<!-- end -->",
            lambda match: f"<!-- table: {match[1]} -->\n{table(match[1])}\n<!-- end -->",
            old,
            flags=re.S,
        )
        if new != old:
            stale.append(page.name)
            if not check:
                page.write_text(new)
    if check and stale:
        print(f"not up to date: {', '.join(stale)}; run python utils/make_tables.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
