"""How the devices of a process use its mesh: a communicator for each, and the mesh of the current connection."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from motley.backends import Rendezvous
from motley.errors import DeviceError
from motley.graph import Shape
from motley.runtime.group import PartSizes, ThreadGroup
from motley.runtime.hosts.mesh import Mesh


class MeshLine:
    """One device's communicator in a crew of several processes (group.Communicator)."""

    def __init__(self, group: ThreadGroup, index: int, members: Sequence[int], link: MeshLink) -> None:
        """`index`: the device's number among the devices of this process, which are `members` of the crew."""
        self._inner = group.lines[index]
        self._index = index
        self._members = members
        self._link = link
        self.device = members[index]
        self.n_devices = len(link.owners)
        self.reader = link.owners.index(0)

    @property
    def rendezvous(self) -> tuple[Rendezvous, int] | None:
        """The rendezvous in which native programs do collectives without this object, and the device's number there."""
        found = self._link.rendezvous
        return None if found is None else (found, self.device)

    def exchange(self, part: torch.Tensor | None, sizes: PartSizes) -> Sequence[torch.Tensor | None]:
        """The first device of the process exchanges the parts of all its devices; the others wait for it.

        A group of devices is in one process: it needs no other.
        """
        if sizes.members:
            own = self._inner.exchange_among(tuple(map(self._members.index, sizes.members)), part)
            found: list[torch.Tensor | None] = [None] * self.n_devices
            for index, device in enumerate(self._members):
                found[device] = own[index]
            return found
        if self._link.mesh.is_on_gpus(sizes):
            return self._link.mesh.exchange_on_gpus(self.device, part, sizes)
        if len(self._members) == 1:
            return self._link.mesh.exchange([part], sizes)
        own = self._inner.exchange(part)
        if self._index == 0:
            self._link.parts = self._link.mesh.exchange(own, sizes)
        self._inner.exchange(None)
        return self._link.parts

    def send(self, tensor: torch.Tensor, target: int) -> None:
        if target in self._members:
            self._inner.send(tensor, self._members.index(target))
        else:
            self._link.mesh.send(tensor, self.device, target)

    def receive(self, source: int, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        if source in self._members:
            return self._inner.receive(self._members.index(source))
        return self._link.mesh.receive(source, self.device, shape, dtype)


class MeshLink:
    """The mesh that the devices of a process use at present. After a loss there is another one, for the same plans."""

    def __init__(self, owners: Sequence[int]) -> None:
        self.owners = tuple(owners)
        self.parts: Sequence[torch.Tensor | None] = ()  # of the latest exchange
        self._mesh: Mesh | None = None

    @property
    def mesh(self) -> Mesh:
        if self._mesh is None:
            raise DeviceError("the crew is not connected", hint="a worker was lost")
        return self._mesh

    @property
    def rendezvous(self) -> Rendezvous | None:
        """The mesh's; another one after each connection."""
        return None if self._mesh is None else self._mesh.rendezvous

    def connect(self, mesh: Mesh) -> None:
        assert mesh.owners == self.owners
        self._mesh = mesh

    def abort(self) -> None:
        """Makes devices that wait for other processes fail. May be called by any thread."""
        mesh = self._mesh
        if mesh is not None:
            mesh.abort()

    def disconnect(self) -> None:
        mesh, self._mesh = self._mesh, None
        if mesh is not None:
            mesh.close()
