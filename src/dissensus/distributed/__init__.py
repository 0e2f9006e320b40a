"""Training in several processes: a mesh with two axes, members and data, that gives the results of one process.

`torchrun` starts the processes and torch.distributed connects them; this package divides members and rows among them.
"""

from dissensus.distributed.init import start
from dissensus.distributed.mesh import Axis, Mesh, mesh, shard
from dissensus.utils.process_group import MissingRankError

__all__ = ["Axis", "Mesh", "MissingRankError", "mesh", "shard", "start"]
