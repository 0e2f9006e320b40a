"""Many machines: a mesh of processes in two directions, members and data, that trains to the result of one process.

`torchrun` starts the processes and torch.distributed connects them; this room says who has which members and which rows.
"""

from dissensus.distributed.joining import start
from dissensus.distributed.mesh import Axis, Mesh, mesh
from dissensus.distributed.sharding import shard

__all__ = ["Axis", "Mesh", "mesh", "shard", "start"]
