"""A state dict that only the first rank has."""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only


@dataclasses.dataclass(frozen=True)
class _Elsewhere:
    """Stands for a tensor of the first rank."""

    shape: torch.Size
    dtype: torch.dtype


class FromFirstRank:
    """Tells all ranks at once what there is, and gives them its tensors when they are fetched. All is collective."""

    def __init__(self, given: dict[str, Any] | None, device: torch.device, group: dist.ProcessGroup | None):
        self.device, self.group = device, group
        self.source = 0 if group is None else dist.get_global_rank(group, 0)
        self.is_here = dist.get_rank(group) == 0
        told = [tree_map_only(torch.Tensor, _outline, given) if self.is_here else None]
        dist.broadcast_object_list(told, self.source, group)
        self.outline: dict[str, Any] = (given if self.is_here else told[0]) or {}

    def fetch(self, state: dict[str, Any]) -> dict[str, Any]:
        """The same, with its tensors."""
        return {name: self._fetch(value) for name, value in state.items()}

    def _fetch(self, value: Any) -> Any:
        if self.is_here and isinstance(value, torch.Tensor) and value.dim() > 0:
            tensor = value.detach().to(self.device).contiguous()
        elif isinstance(value, _Elsewhere):
            tensor = torch.empty(value.shape, dtype=value.dtype, device=self.device)
        else:
            return value
        dist.broadcast(tensor, self.source, self.group)
        return tensor


def _outline(tensor: torch.Tensor) -> torch.Tensor | _Elsewhere:
    return tensor.detach().cpu() if tensor.dim() == 0 else _Elsewhere(tensor.shape, tensor.dtype)
