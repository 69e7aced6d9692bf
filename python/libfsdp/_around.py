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

    def of_gradient(self, placements: Sequence[Placement]) -> tuple[Placement, ...]:
        """How the engine wants a gradient that came with ``placements``: as the parameter, but along data parallel
        dimensions as it is, for what each rank has there is what the engine reduces."""
        pairs = enumerate(zip(placements, self.placements, strict=True))
        return tuple(given if dim in self.data_parallel else own for dim, (given, own) in pairs)

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
        if gradient is None:
            return None, None, None
        wanted = ctx.around.of_gradient(gradient.placements)
        if wanted != tuple(gradient.placements):
            gradient = gradient.redistribute(placements=wanted)
        return gradient.to_local(), None, None
