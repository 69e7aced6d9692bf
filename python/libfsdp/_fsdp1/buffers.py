"""Buffers in lower precision: cast at the root's first forward, and cast back by state dicts, and for an evaluation in
full precision, only."""

import torch
from torch import nn

from .places import own_buffers
from .state import instances_below


def cast_buffers(root: nn.Module) -> None:
    """Each to what the nearest wrapper above it says."""
    seen: set[torch.Tensor] = set()
    for instance in reversed(instances_below(root)):
        dtype, ignored = instance.mixed_precision.buffer_dtype, instance._ignored.buffers
        for _, buffer in own_buffers(instance):
            if buffer in seen or buffer in ignored:
                continue
            seen.add(buffer)
            if dtype is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                buffer._fsdp_dtype = buffer.dtype
                buffer.data = buffer.to(dtype)


def restore_buffers(root: nn.Module) -> None:
    """To their own dtypes."""
    for instance in instances_below(root):
        for _, buffer in own_buffers(instance):
            buffer.data = buffer.to(saved_dtype(buffer))


def saved_dtype(buffer: torch.Tensor) -> torch.dtype:
    """In which it is saved: its own."""
    return getattr(buffer, "_fsdp_dtype", buffer.dtype)
