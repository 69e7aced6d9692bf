"""What a module reads where its parameters were DTensors before ``fully_shard``: DTensors around the engine's wholes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class Around:
    """How a parameter lay before ``fully_shard``."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    data_parallel: frozenset[int]  # the mesh's dimensions along which the engine reduces gradients

    def wrap(self, whole: torch.Tensor, shape: torch.Size, stride: Sequence[int]) -> DTensor:
        """Gradients of what this gives are ``whole``'s."""
        meta = TensorMeta(shape, tuple(stride), whole.dtype)
        return _Wrap.apply(whole, DTensorSpec(self.mesh, self.placements, tensor_meta=meta), self)

    def local_gradient(self, gradient: DTensor) -> torch.Tensor:
        """This rank's part, placed as the parameter is. Along data parallel dimensions it stays as it is, for the engine
        adds up what the ranks have there; of what is cut there, each gives a share of the whole."""
        wanted, shares = [], 1
        for dim, (given, own) in enumerate(zip(gradient.placements, self.placements, strict=True)):
            is_cut = dim in self.data_parallel and given.is_shard()
            wanted.append(given if dim in self.data_parallel and not is_cut else own)
            shares *= self.mesh.size(dim) if is_cut else 1
        if wanted != list(gradient.placements):
            gradient = gradient.redistribute(placements=wanted)
        return gradient.to_local() if shares == 1 else gradient.to_local() / shares

    @property
    def cuts(self) -> bool:
        return not all(placement.is_replicate() for placement in self.placements)


class _Wrap(torch.autograd.Function):
    """As ``DTensor.from_local``, but for how the gradient is placed."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, spec: DTensorSpec, around: Around) -> DTensor:
        ctx.around = around
        ctx.set_materialize_grads(False)
        return DTensor(whole.view_as(whole), spec, requires_grad=whole.requires_grad)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> tuple[torch.Tensor | None, None, None]:
        return None if gradient is None else ctx.around.local_gradient(gradient), None, None
