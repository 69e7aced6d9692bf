"""``FullyShardedDataParallel``: PyTorch's first interface to fully sharded training, on the same engine."""
