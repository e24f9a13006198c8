"""What vendors' tools print, as data. A parser raises ValueError for what it cannot make sense of, cut off, say."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Link:
    """Between two GPUs.

    Attributes:
        kind: "xGMI", "NVLink", "PCIe", or "unknown".
        detail: the tool's own word: NV18, PHB, ...
        enabled: whether the driver lets one reach the other.
        hops: None where the tool does not say.
    """

    kind: str
    detail: str
    enabled: bool = True
    hops: int | None = None


Topology = Mapping[tuple[int, int], Link]
_KINDS = {"XGMI": "xGMI", "PCIE": "PCIe"} | dict.fromkeys(("N/A", "NOT_APPLICABLE", "UNKNOWN"), "unknown")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# A line that begins a list or an object, and not one such as `[WARNING] ...`.
_JSON = re.compile(r"^\s*(?=[\[{]\s*(?:$|[\[\]{}\"]|\d+\s*,))", re.MULTILINE)


def _kind(word: Any) -> str:
    if str(word).upper() not in _KINDS:
        raise ValueError(f"{word!r} is no type of link that is known")
    return _KINDS[str(word).upper()]


def _number(value: Any) -> int | None:
    return int(value) if str(value).isdecimal() else None


def amd_smi_topology(text: str) -> Topology:
    """`amd-smi topology --json`: a list of links by GPU (from 6.1.1), maps by `gpu_N` (before), wrapped or not."""
    text = _COLOURS.sub("", text)
    start = _JSON.search(text)
    if start is None:
        raise ValueError("no JSON in it")
    try:
        content, _ = json.JSONDecoder().raw_decode(text, start.end())
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos} of {len(text)}") from None
    except RecursionError:
        raise ValueError("not a list of GPUs: nested too deep") from None
    if isinstance(content, dict) and "gpu" not in content:
        content = next((value for value in content.values() if isinstance(value, list) and value), None)
    content = [content] if isinstance(content, dict) else content
    if not isinstance(content, list) or not content:
        raise ValueError("no list of GPUs in it")
    found = {}
    for gpu in content:
        try:
            found.update(_links_listed(gpu) if "links" in gpu else _links_mapped(gpu))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"a GPU's entry lacks what was looked for: {error}") from None
    return found


def _links_listed(gpu: Mapping[str, Any]) -> dict[tuple[int, int], Link]:
    return {
        (int(gpu["gpu"]), int(link["gpu"])): Link(
            _kind(link["link_type"]),
            str(link["link_type"]),
            str(link["link_status"]).upper() != "DISABLED",
            _number(link["num_hops"]),
        )
        for link in gpu["links"]
        if str(link["link_type"]).upper() != "SELF"
    }


def _links_mapped(gpu: Mapping[str, Any]) -> dict[tuple[int, int], Link]:
    found = {}
    for key, kind in gpu["link_type"].items():
        if str(kind).upper() != "SELF":
            enabled = str(gpu.get("link_accessibility", {}).get(key)).upper() != "DISABLED"
            hops = _number(gpu.get("hops", {}).get(key))
            found[int(gpu["gpu"]), int(key.removeprefix("gpu_"))] = Link(_kind(kind), str(kind), enabled, hops)
    return found


def rocm_smi_topology(text: str) -> Topology:
    """`rocm-smi --showtopo`: tables of weights, hops and types under headings."""
    titles = re.split(r"^=+ *(.*?) *=+$", _COLOURS.sub("", text), flags=re.MULTILINE)
    sections = dict(zip(titles[1::2], titles[2::2], strict=True))
    if "Link Type between two GPUs" not in sections:
        raise ValueError("no section 'Link Type between two GPUs'")
    kinds, hops = _table(sections["Link Type between two GPUs"]), {}
    if "Hops between two GPUs" in sections:
        hops = _table(sections["Hops between two GPUs"])
    return {pair: Link(_kind(word), word, hops=_number(hops.get(pair))) for pair, word in kinds.items()}


def nvidia_smi_topology(text: str) -> Topology:
    """`nvidia-smi topo -m`: one table, with network cards and affinities beside the GPUs."""
    found = {}
    for pair, word in _table(_COLOURS.sub("", text)).items():
        if not re.fullmatch(r"NV\d+|PIX|PXB|PHB|NODE|SYS", word):
            raise ValueError(f"{word!r} is no type of link that is known")
        found[pair] = Link("NVLink" if word.startswith("NV") else "PCIe", word)
    return found


def _table(text: str) -> dict[tuple[int, int], str]:
    """Cells of a table whose rows and first columns are GPUs, but for its diagonal."""
    lines = [line.split() for line in text.splitlines() if re.match(r"\s*GPU\d+\b", line)]
    header, *rows = lines or [[]]
    columns = [int(word[3:]) for word in header if re.fullmatch(r"GPU\d+", word)]
    if not columns:
        raise ValueError("no table of GPUs in it")
    found = {}
    for row in rows[: len(columns)]:
        name, cells = row[0], row[1 : len(columns) + 1]
        if len(cells) < len(columns):
            raise ValueError(f"the row of {name} has {len(cells)} of {len(columns)} columns: cut off?")
        for column, cell in zip(columns, cells, strict=True):
            if column != int(name[3:]):
                found[int(name[3:]), column] = cell
    if len(rows) < len(columns):
        raise ValueError(f"{len(rows)} of {len(columns)} rows: cut off?")
    return found


def amd_smi_fields(text: str) -> dict[int, dict[str, str]]:
    """`amd-smi static` and `amd-smi metric`: by GPU, what stands after each KEY, the first of a name."""
    found: dict[int, dict[str, str]] = {}
    fields = None
    for line in text.splitlines():
        key, colon, value = (part.strip() for part in line.partition(":"))
        if colon and key == "GPU" and value.isdecimal():
            fields = found.setdefault(int(value), {})
        elif colon and value and fields is not None:
            fields.setdefault(key, value)
    if not found:
        raise ValueError("no GPU in it")
    return found


def ibv_devices(text: str) -> list[str]:
    """Names of the RDMA devices that libibverbs can use."""
    if not re.search(r"^\s*device\s+node GUID", text, re.MULTILINE):
        raise ValueError("no table of devices in it")
    return re.findall(r"^\s+(\S+)\s+[0-9a-f]{16}\s*$", text, re.MULTILINE)


def ibv_abi_mismatches(text: str) -> list[str]:
    """Drivers whose kernel part libibverbs is too old or too new for, as it warns."""
    pattern = r"Driver (\S+) does not support the kernel ABI of (\d+) \(supports (\d+) to (\d+)\)"
    return [f"{name}: kernel ABI {has}, library {low} to {high}" for name, has, low, high in re.findall(pattern, text)]
