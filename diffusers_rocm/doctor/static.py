"""The static checks, and to which machines each of them applies."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from . import cards, host, settings
from .finding import Finding, skipped, warning
from .machine import Machine


Check = Callable[[Machine], Finding]

# (whom they are for, why not for others, the checks)
CHECKS: tuple[tuple[Callable[[Machine], bool], str, tuple[Check, ...]], ...] = (
    (lambda machine: True, "", (cards.torch_build,)),
    (
        lambda machine: machine.is_for_amd,
        "no AMD GPU",
        (
            cards.permissions,
            cards.integrated_gpu,
            cards.architecture,
            cards.aotriton,
            cards.miopen_find_mode,
            cards.large_bar,
            cards.collective_library,
            host.iommu,
            host.numa_balancing,
        ),
    ),
    (lambda machine: machine.gpus > 0, "no GPU", (cards.pcie_link,)),
    (lambda machine: machine.gpus > 1, "not several GPUs", (cards.topology, host.shared_memory)),
    (lambda machine: bool(machine.rdma_devices), "no RDMA device", (host.rdma_devices, host.rdma_library)),
    (lambda machine: bool(machine.rdma_devices), "no RDMA device", (host.locked_memory, settings.rdma_gid)),
    (
        lambda machine: True,
        "",
        (
            settings.socket_interfaces,
            settings.gloo_interfaces,
            settings.rdma_names,
            settings.transports,
            settings.values,
        ),
    ),
)


def static_checks(machine: Machine) -> Iterator[Finding]:
    """Each check's finding, under the check's name. A check that fails is a warning that says so."""
    for applies, why, checks in CHECKS:
        for check in checks:
            name = check.__name__.replace("_", " ")
            try:
                found = check(machine) if applies(machine) else skipped(why)
            except (ValueError, OSError) as error:
                found = warning(f"could not be looked at: {error}", "diffusers-rocm env")
            yield replace(found, name=name)
