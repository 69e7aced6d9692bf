"""Accelerate takes its FSDP plugin on accelerators only: on the CPU it replicates, without a word. Here it shards there."""

import functools

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType


def shard_on_cpu() -> None:
    original = AcceleratorState.__init__

    @functools.wraps(original)
    def init(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is None or self.distributed_type != DistributedType.MULTI_CPU:
            return
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
        if self.mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self.mixed_precision)

    AcceleratorState.__init__ = init
