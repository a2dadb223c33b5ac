"""Gives each worker the cores and memory next to its GPU, and finds the network cards near it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PciPlace:
    """The place of a card on the PCI bus.

    Attributes:
        numa_node: the nearest NUMA node; -1 if the firmware does not say.
        path: the root complex, the bridges and switches on the way to the card, and the card itself.
    """

    numa_node: int
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HostHardware:
    """The topology of this host: its cores, memory, GPUs and network cards.

    Attributes:
        nodes: the cores of each NUMA node that has cores.
        memory: the NUMA nodes on which this process may allocate memory; empty: it may not choose.
        gpus: the place of each GPU, by its PCI bus id.
        adapters: the place of each InfiniBand or RoCE adapter with an active port.
        interfaces: the place of each Ethernet card that is up, by the interface's name.
    """

    nodes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    memory: frozenset[int] = frozenset()
    gpus: Mapping[str, PciPlace] = field(default_factory=dict)
    adapters: Mapping[str, PciPlace] = field(default_factory=dict)
    interfaces: Mapping[str, PciPlace] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Placement:
    """The cores and memory of one worker.

    Attributes:
        cores: the cores to which it is bound; empty: all that the launch may use.
        memory_node: the NUMA node on which it prefers to allocate memory; -1: none.
    """

    cores: tuple[int, ...] = ()
    memory_node: int = -1


ANYWHERE = Placement()
NOTHING_READ = HostHardware()


def share(cores: Sequence[int], index: int, parts: int) -> tuple[int, ...]:
    """Returns part ``index`` of the cores, cut into ``parts``; parts share a core if there are too few."""
    if len(cores) < parts:
        return (cores[index % len(cores)],) if cores else ()
    return tuple(cores[index * len(cores) // parts : (index + 1) * len(cores) // parts])


def spread_over_cores(cores: Sequence[int], workers: int) -> tuple[Placement, ...]:
    """Gives each worker its own part of the cores, in order."""
    return tuple(Placement(share(cores, index, workers)) for index in range(workers))


def spread_over_nodes(
    hardware: HostHardware, cores: Sequence[int], gpus: Sequence[str]
) -> tuple[tuple[Placement, ...], tuple[str, ...]]:
    """Gives each worker a part of the cores of its GPU's NUMA node, and that node's memory.

    Workers without a GPU, and those whose GPU's node is not known, are spread over the nodes in blocks.

    Args:
        hardware: the topology of the host.
        cores: the cores that the launch may use.
        gpus: the PCI bus id of each worker's GPU; empty if it has none.

    Returns:
        The place of each worker, and sentences about what could not be done.
    """
    allowed = {
        node: tuple(sorted(set(own) & set(cores)))
        for node, own in hardware.nodes.items()
        if set(own) & set(cores)
    }
    if not allowed:
        note = "--bind numa: the NUMA nodes of this host cannot be read; workers are bound to cores alone"
        return spread_over_cores(cores, len(gpus)), (note,)
    notes = []
    nodes = []
    for index, bus_id in enumerate(gpus):
        place = hardware.gpus.get(bus_id)
        node = -1 if place is None else place.numa_node
        if node not in allowed:
            if bus_id and len(allowed) > 1:
                what = (
                    f"no core of its NUMA node {node} may be used"
                    if node >= 0
                    else "its NUMA node is not known"
                )
                notes.append(f"--bind numa: GPU {bus_id} of worker {index}: {what}")
            node = list(allowed)[index * len(allowed) // len(gpus)]
        nodes.append(node)
    if not hardware.memory:
        notes.append(
            "--bind numa: memory cannot be chosen here (set_mempolicy is refused); workers are bound to"
            " cores, near which the kernel places what they first touch"
        )
    of_node = Counter(nodes)
    before: Counter[int] = Counter()
    placements = []
    for node in nodes:
        own = share(allowed[node], before[node], of_node[node])
        before[node] += 1
        placements.append(Placement(own, node if node in hardware.memory else -1))
    return tuple(placements), tuple(notes)


def near_cards(cards: Mapping[str, PciPlace], gpus: Sequence[PciPlace]) -> tuple[str, ...]:
    """Returns the network cards nearest to one of the GPUs, in order of their names.

    The nearest cards share most of a GPU's path through bridges and switches; otherwise, its NUMA node.
    """
    near: set[str] = set()
    for gpu in gpus:
        shared = {name: _shared(gpu.path, card.path) for name, card in cards.items()}
        most = max(shared.values(), default=0)
        if most:
            near |= {name for name, count in shared.items() if count == most}
        elif gpu.numa_node >= 0:
            near |= {name for name, card in cards.items() if card.numa_node == gpu.numa_node}
    return tuple(sorted(near))


def propose_cards(
    hardware: HostHardware, gpus: Sequence[str], env: Mapping[str, str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Proposes to NCCL the network cards next to the host's GPUs, if it would use others as well.

    All workers of the host get the same list, because NCCL numbers the cards in each process and compares the
    numbers. Network interfaces for sockets are only named to the user, because only the user knows which
    network reaches the other hosts.

    Args:
        hardware: the topology of the host.
        gpus: the PCI bus ids of the GPUs that the launch uses.
        env: the launcher's environment; variables that the user has set there are kept.

    Returns:
        Variables for all workers, and sentences for the user.
    """
    places = [hardware.gpus[bus_id] for bus_id in gpus if bus_id in hardware.gpus]
    adapters = near_cards(hardware.adapters, places)
    if adapters:
        if "NCCL_IB_HCA" in env or len(adapters) == len(hardware.adapters):
            return {}, ()
        names = ",".join(adapters)
        return {"NCCL_IB_HCA": f"={names}"}, (
            f"--bind numa: NCCL is to use {names}, which are next to the GPUs",
        )
    interfaces = near_cards(hardware.interfaces, places)
    if not interfaces or len(interfaces) == len(hardware.interfaces):
        return {}, ()
    if {"MS_INTERFACE", "NCCL_SOCKET_IFNAME"} & env.keys():
        return {}, ()
    names = ", ".join(interfaces)
    return {}, (f"next to the GPUs: {names}; if the other hosts are reached by it, set MS_INTERFACE to it",)


def _shared(ours: Sequence[str], theirs: Sequence[str]) -> int:
    """Counts the steps from the root that two paths through the host have in common."""
    count = 0
    for own, other in zip(ours, theirs, strict=False):
        if own != other:
            break
        count += 1
    return count
