"""Which GPU of a host a worker has, under all of its names; pure."""

from __future__ import annotations

from muster.wire.messages import Value


class GpuIdentity(Value):
    """One GPU; an empty name, or -1, is not known.

    Attributes:
        index: its number among those of the host.
        pci_bus_id: its PCI bus id, such as ``0000:65:00.0``.
        uuid: its uuid from the driver, ``GPU-...``, or that of a part of a GPU, ``MIG-...``.
    """

    index: int = -1
    pci_bus_id: str = ""
    uuid: str = ""
