"""The policies: PyTorch's own classes, so that programs may take them from either package."""

from dataclasses import dataclass

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

try:
    from torch.distributed.fsdp import DataParallelMeshDims
except ImportError:  # torch 2.11

    @dataclass
    class DataParallelMeshDims:
        """Which dimensions of a mesh are data parallel, where the parameters are DTensors on that whole mesh already.

        ``shard`` and ``replicate`` are names of mesh dimensions, one or several.
        """

        shard: str | tuple[str, ...] | None = None
        replicate: str | tuple[str, ...] | None = None

        def __post_init__(self) -> None:
            if self.shard is None and self.replicate is None:
                raise ValueError("DataParallelMeshDims: At least one of shard and replicate is needed")

        @property
        def shard_names(self) -> tuple[str, ...]:
            return (self.shard,) if isinstance(self.shard, str) else tuple(self.shard or ())

        @property
        def replicate_names(self) -> tuple[str, ...]:
            return (self.replicate,) if isinstance(self.replicate, str) else tuple(self.replicate or ())


__all__ = ["CPUOffloadPolicy", "DataParallelMeshDims", "MixedPrecisionPolicy", "OffloadPolicy"]
