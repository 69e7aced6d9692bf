"""A program for PyTorch's fully_shard, after its one change. Take the other import and it is the program before:

    -from torch.distributed.fsdp import fully_shard
    +from libfsdp import fully_shard

    torchrun --nproc-per-node 2 examples/python/switch_from_pytorch.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from libfsdp import fully_shard

dist.init_process_group()
torch.manual_seed(0)
model = nn.Transformer(64, 4, 2, 2, 256, dropout=0.0, batch_first=True)
policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
for layer in [*model.encoder.layers, *model.decoder.layers]:
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(1 + dist.get_rank())
source, target = torch.randn(4, 16, 64), torch.randn(4, 16, 64)
for step in range(20):
    loss = (model(source, target) - target).pow(2).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 5 == 4:
        print(f"step {step + 1}: loss {loss.item():.6f}", flush=True)

dist.destroy_process_group()
