"""Networks whose weights are divided over the ranks of the data axis: each member is put together when its turn comes."""

from typing import TypeVar

from torch import nn

from dissensus.core.fully import check_whole
from dissensus.core.member import check_initialised
from dissensus.distributed.mesh import Mesh

Network = TypeVar("Network", bound=nn.Module)


def shard(network: Network, mesh: Mesh) -> Network:
    """The network itself, of each of whose parameters every rank of the data axis keeps a part; the first process's values.

    For methods that hold one network or loop over several. In training and prediction one member at a time is whole; its
    gradients, the optimiser's states and all other members stay divided. To be called by every process, before the method
    is built. On one process it does nothing.

    Args:
        network: built whole, on the CPU for example: parts go to the mesh's device.
        mesh: with ranks for data alone, `mesh(members=1)`.
    """
    check_initialised(network)
    check_whole(network)
    if mesh.device_mesh is None:
        return network
    from torch.distributed.tensor import Shard, distribute_tensor

    network.to(mesh.device)
    made: dict[int, nn.Parameter] = {}  # tied parameters stay tied
    for part in network.modules():
        for name, parameter in part._parameters.items():
            if parameter is None or not parameter.ndim or not parameter.is_floating_point():
                continue
            if id(parameter) not in made:
                longest = max(range(parameter.ndim), key=lambda axis: parameter.shape[axis])
                parts = distribute_tensor(parameter.detach(), mesh.device_mesh["data"], [Shard(longest)])
                made[id(parameter)] = nn.Parameter(parts, requires_grad=parameter.requires_grad)
            part._parameters[name] = made[id(parameter)]
    return network
