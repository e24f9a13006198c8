"""Static checks of GPUs and of the torch that is to use them. What is known of AMD's: docs/troubleshooting.md."""

import mmap
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from ..distributed.environment import SETTINGS
from .debug_log import known_bad
from .finding import Finding, ok, problem, skipped, warning
from .machine import INTEGRATED, Machine, number
from .tools import Topology, amd_smi_fields, amd_smi_topology, nvidia_smi_topology, rocm_smi_topology


INSTALL_ROCM = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/rocm6.4"


def torch_build(machine: Machine) -> Finding:
    """Is this torch built for the cards that there are, and does it see them?"""
    torch = machine.torch
    kind = f"ROCm {torch.hip}" if torch.hip else f"CUDA {torch.cuda}" if torch.cuda else "CPU only"
    seen = f"torch {torch.version} ({kind}), {len(torch.devices)} GPU(s) to it"
    if machine.is_for_amd and not torch.hip:
        if machine.kfd_architectures and set(machine.kfd_architectures) <= {*INTEGRATED}:
            return warning(f"{seen}; the CPU's own GPU, {machine.kfd_architectures[0]}, is not used", INSTALL_ROCM)
        return problem(f"{seen}; there are AMD cards, which need a ROCm build", INSTALL_ROCM)
    if machine.has_nvidia and not machine.is_for_amd and not torch.cuda:
        return problem(
            f"{seen}; there are NVIDIA cards, which need a CUDA build", "pip install --force-reinstall torch"
        )
    if (machine.has_amd or machine.has_nvidia) and not torch.devices:
        why = "nvidia-smi" if torch.cuda else "ls -l /dev/kfd /dev/dri; rocminfo"
        why = f"env | grep VISIBLE_DEVICES; {why}"
        return problem(f"{seen}, though there are cards", f'{why}; python -c "import torch; torch.zeros(1).cuda()"')
    return ok(seen)


def visible(machine: Machine) -> list[int] | None:
    """Which of the compute driver's GPUs HIP will show; None where a variable names them by anything but a number."""
    shown = list(range(len(machine.kfd_architectures)))
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        wanted = machine.environment.get(name)
        if wanted is None or (name == "CUDA_VISIBLE_DEVICES" and "HIP_VISIBLE_DEVICES" in machine.environment):
            continue
        chosen, places = [], {str(index): gpu for index, gpu in enumerate(shown)}
        for word in wanted.split(","):
            word = word.strip() if name == "ROCR_VISIBLE_DEVICES" else word  # HIP knows no `0 ` (clr rocdevice.cpp)
            if "GPU-" in word.upper():
                return None
            if word not in places:
                break  # what stands before the first that is not there is taken
            chosen.append(places[word])
        shown = chosen
    return shown


def integrated_gpu(machine: Machine) -> Finding:
    """A GPU in the CPU that joins the cards stops collectives (rccl #876)."""
    found = machine.kfd_architectures
    shown = visible(machine)
    if not found or shown is None:
        return skipped("the driver's list of GPUs is not readable" if not found else "devices are chosen by UUID")
    inside = [index for index in shown if found[index] in INTEGRATED]
    cards = [index for index in range(len(found)) if found[index] not in INTEGRATED]
    seen = ", ".join(f"{index}: {found[index]}" for index in shown) or "no GPU is visible"
    if inside and cards:
        wanted = ",".join(map(str, cards))
        return problem(
            f"{seen}; {', '.join(found[index] for index in inside)} is the CPU's own GPU",
            f"unset ROCR_VISIBLE_DEVICES CUDA_VISIBLE_DEVICES; export HIP_VISIBLE_DEVICES={wanted}",
        )
    return ok(seen)


def _architectures(machine: Machine) -> list[str]:
    """Of the GPUs that are visible, by the driver or else by amd-smi (which leaves it out in 6.1.1)."""
    found, shown = machine.kfd_architectures, visible(machine)
    if found:
        return [found[index] for index in (range(len(found)) if shown is None else shown)]
    text = machine.run(("amd-smi", "static"))
    fields = amd_smi_fields(text).values() if text else ()
    return [each["TARGET_GRAPHICS_VERSION"] for each in fields if "TARGET_GRAPHICS_VERSION" in each]


def architecture(machine: Machine) -> Finding:
    """Has this torch kernels for these cards? The CPU's own GPU, where it is one of them, is `integrated_gpu`'s."""
    every, built = {*_architectures(machine)}, [each.split(":")[0] for each in machine.torch.architectures]
    present = every - {*INTEGRATED} or every
    if not present or not built:
        return skipped("which architectures there are is not known")
    override = machine.environment.get("HSA_OVERRIDE_GFX_VERSION")
    if override is not None:
        words = override.split(".")
        if len(words) != 3 or not all(word.isdecimal() for word in words):
            return problem(f"HSA_OVERRIDE_GFX_VERSION={override} is not like 11.0.0", "unset HSA_OVERRIDE_GFX_VERSION")
        present = {f"gfx{words[0]}{int(words[1]):x}{int(words[2]):x}"}
    missing = sorted(present - {*built})
    seen = f"{', '.join(sorted(present))}; torch has {', '.join(built)}"
    if not missing:
        return ok(seen)
    # A card runs code of its family's first: gfx1101 that of gfx1100 (HSA_OVERRIDE_GFX_VERSION=11.0.0). All have to be
    # of the family: the variable is for every GPU that the process sees.
    near = next((each for each in built if each.endswith("0") and {arch[:-1] for arch in every} == {each[:-1]}), None)
    if near and override is None and len(near) == len("gfx1100"):
        return problem(
            f"{seen}, not {', '.join(missing)}",
            f"export HSA_OVERRIDE_GFX_VERSION={near[3:5]}.{int(near[5], 16)}.{int(near[6], 16)}",
        )
    return problem(f"{seen}, not {', '.join(missing)}", INSTALL_ROCM)


def _wanting(machine: Machine, name: str) -> list[str]:
    """Architectures of the GPUs that the launcher would set the variable for."""
    archs = {arch for setting in SETTINGS if setting.name == name for arch in setting.archs}
    return sorted(archs & {*_architectures(machine)})


def aotriton(machine: Machine) -> Finding:
    """Without it SDPA takes its math kernel in silence, 3.6 to 13 times slower (unsloth #8821)."""
    name = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
    asking, value = _wanting(machine, name), machine.environment.get(name)
    if not asking:
        return skipped("no GPU whose attention kernels are experimental")
    if value != "1":
        return warning(
            f"{name} is {'not set' if value is None else value}: attention on {', '.join(asking)} may be math alone",
            f"export {name}=1  # before Python starts: torch reads it once",
        )
    return ok(f"{name}=1, for {', '.join(asking)}")


def miopen_find_mode(machine: Machine) -> Finding:
    """A VAE's first decode tries every algorithm for minutes (YuE #169: 84.5 s, and 7.2 s in FAST)."""
    value = machine.environment.get("MIOPEN_FIND_MODE")
    if not _wanting(machine, "MIOPEN_FIND_MODE"):
        return skipped("no GPU that the launcher sets MIOPEN_FIND_MODE for")
    if value is None or value.upper() not in ("FAST", "2"):
        return warning(
            f"MIOPEN_FIND_MODE is {value or 'not set'}: the first decode may take minutes",
            "export MIOPEN_FIND_MODE=FAST",
        )
    return ok(f"MIOPEN_FIND_MODE={value}")


def permissions(machine: Machine) -> Finding:
    """May this user open the compute driver and the cards?"""
    render = [f"/dev/dri/{name}" for name in machine.listed("/dev/dri") if name.startswith("renderD")]
    if not machine.path("/dev/kfd").exists() or not render:
        gone = "/dev/kfd" if not machine.path("/dev/kfd").exists() else "/dev/dri/renderD*"
        return problem(
            f"no {gone}: in a container it has to be given",
            "docker run --device /dev/kfd --device /dev/dri --group-add video --group-add render ...",
        )
    closed = [file for file in ("/dev/kfd", *render) if not machine.access(machine.path(file))]
    if closed:
        return problem(
            f"this user may not open {', '.join(closed)}", "sudo usermod -aG render,video $USER  # then log in again"
        )
    return ok(f"/dev/kfd and {len(render)} render device(s) can be opened")


def large_bar(machine: Machine) -> Finding:
    """Cards see each other's memory through a window that the firmware sizes; a small one rules out P2P (rccl #92).

    The CPU's own GPU is no card; where the compute driver does not say so, its little memory does.
    """
    small, sizes = [], []
    for card in machine.amd_cards:
        folder = f"/sys/bus/pci/devices/{card}"
        memory = number(machine.read(f"{folder}/mem_info_vram_total"))
        regions = [line.split() for line in (machine.read(f"{folder}/resource") or "").splitlines()]
        try:
            window = max((int(row[1], 16) - int(row[0], 16) + 1 for row in regions if len(row) == 3), default=None)
        except ValueError:
            window = None
        if memory is None or window is None or memory < 2 << 30 or card in machine.integrated:
            continue
        sizes.append(f"{window / 2**30:.4g} of {memory / 2**30:.4g} GiB")
        if window < memory:
            small.append(card)
    if not sizes:
        return skipped("there is no card whose PCI resources are readable")
    seen = f"host and peers see {', '.join(sizes)}"
    if small:
        return warning(
            f"{seen}: turn on 'Above 4G decoding' and 'Resizable BAR' in the firmware",
            f"sudo lspci -vvs {small[0]} | grep -A2 'Resizable BAR'; sudo systemctl reboot --firmware-setup",
        )
    return ok(seen)


def pcie_link(machine: Machine) -> Finding:
    """Lanes of each card against its own most, and speed against what all on its way have.

    A card has bridges of its own, behind which it is always wide: its whole way to the CPU counts.
    """
    seen, narrow, slow = [], [], []
    for card in (*machine.amd_cards, *machine.nvidia_cards):
        way = machine.path(f"/sys/bus/pci/devices/{card}").resolve()
        folders = [folder for folder in (way, *way.parents) if (folder / "current_link_width").exists()]
        if not folders:
            continue
        widths, speeds, lanes, most = (
            _by_address(folders, f"{which}_link_{what}") for which in ("current", "max") for what in ("width", "speed")
        )
        if not widths or not speeds or card not in lanes or card not in most:
            continue
        width, speed, slowest = min(widths.values()), min(speeds.values()), min(most, key=most.get)
        limited = f", the most of {slowest} before it" if speed == most[slowest] < most[card] else ""
        seen.append(f"x{width:g} at {speed:g} GT/s{limited}")
        if width < lanes[card]:
            narrow.append(f"{card} has x{width:g} of x{lanes[card]:g}")
        elif speed < most[slowest]:
            slow.append(f"{card} has {speed:g} of {most[slowest]:g} GT/s")
    if not seen:
        seen, narrow, slow = _links_by_amd_smi(machine)
    if not seen:
        return skipped("no PCIe link is readable")
    counted = ", ".join(f"{count} card(s) {text}" for text, count in Counter(seen).items())
    if narrow:
        return warning(
            f"{counted}: {', '.join(narrow)} lanes", "sudo lspci -tv; sudo lspci -vv | grep -E 'LnkCap:|LnkSta:'"
        )
    if slow:
        return warning(
            f"{counted}: {', '.join(slow)}, which is fine if it idles",
            "diffusers-rocm doctor  # while another program computes on the cards",
        )
    return ok(counted)


def _by_address(folders: Iterable[Path], name: str) -> dict[str, float]:
    """The numbers in these files of PCI devices, in the devices' order; of those that have one."""
    found = {}
    for folder in folders:
        try:
            value = number((folder / name).read_text())
        except OSError:
            continue
        if value:
            found[folder.name] = value
    return found


def _links_by_amd_smi(machine: Machine) -> tuple[list[str], list[str], list[str]]:
    texts = [machine.run(("amd-smi", "metric", "-P")), machine.run(("amd-smi", "static", "-b"))]
    if None in texts:
        return [], [], []
    now, most = map(amd_smi_fields, texts)
    seen, narrow, slow = [], [], []
    for gpu, fields in now.items():
        values = [number(fields.get(name)) for name in ("WIDTH", "SPEED")]
        limits = [number(most.get(gpu, {}).get(name)) for name in ("MAX_PCIE_WIDTH", "MAX_PCIE_SPEED")]
        if None in (*values, *limits):
            continue
        seen.append(f"x{values[0]:g} at {values[1]:g} GT/s")
        if values[0] < limits[0]:
            narrow.append(f"GPU {gpu} has x{values[0]:g} of x{limits[0]:g}")
        elif values[1] < limits[1]:
            slow.append(f"GPU {gpu} has {values[1]:g} of {limits[1]:g} GT/s")
    return seen, narrow, slow


TOPOLOGY_TOOLS: tuple[tuple[tuple[str, ...], Callable[[str], Topology]], ...] = (
    (("amd-smi", "topology", "--json"), amd_smi_topology),
    (("rocm-smi", "--showtopo"), rocm_smi_topology),
    (("nvidia-smi", "topo", "-m"), nvidia_smi_topology),
)


def topology(machine: Machine) -> Finding:
    """By the first tool that is there and can be read."""
    failures = []
    for command, parser in TOPOLOGY_TOOLS:
        try:
            text = machine.run(command)
            links = parser(text) if text is not None else None
        except ValueError as error:
            failures.append(str(error) if str(error).startswith(command[0]) else f"{' '.join(command)}: {error}")
            continue
        if links is not None:
            return _judge_topology(links)
    if failures:
        return warning("; ".join(failures), " ".join(TOPOLOGY_TOOLS[0 if machine.has_amd else 2][0]))
    return skipped("no tool that shows links is installed")


def _judge_topology(links: Topology) -> Finding:
    counts = Counter(
        (link.kind if link.kind == link.detail else f"{link.kind} ({link.detail})") for link in links.values()
    )
    seen = ", ".join(f"{kind}: {count // 2} pair(s)" for kind, count in sorted(counts.items())) or "one GPU"
    off = sorted(pair for pair, link in links.items() if not link.enabled)
    if off:
        pairs = ", ".join(f"{a} to {b}" for a, b in off[:8]) + (", ..." if len(off) > 8 else "")
        return warning(f"{seen}; the driver lets {pairs} not reach each other", "export NCCL_P2P_DISABLE=1")
    if {link.kind for link in links.values()} - {"unknown"} > {"PCIe"}:
        return warning(
            f"{seen}: groups of GPUs with slower links between them; keep tp and ulysses within one",
            "amd-smi topology || rocm-smi --showtopo || nvidia-smi topo -m",
        )
    return ok(seen)


def collective_library(machine: Machine) -> Finding:
    """Is the RCCL that torch brings a build that is known not to work?"""
    files = [*Path(machine.torch.folder).glob("librccl.so*")] if machine.torch.folder else []
    files += [file for file in [machine.path("/opt/rocm/lib/librccl.so.1")] if file.exists()]
    for file in files:
        with file.open("rb") as stream:
            if file.stat().st_size == 0:
                continue
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                found = re.search(rb"HEAD:[0-9a-f]{7}", data)
                build = found[0].decode() if found else ""
        if why := known_bad(build):
            return problem(f"{file.name} is {build}; {why}", INSTALL_ROCM)
    return ok(f"no build among {len(files)} that is known not to work") if files else skipped("no librccl to read")
