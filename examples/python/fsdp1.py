"""A program for PyTorch's FullyShardedDataParallel, after its one change. Take the other import and it is the program before:

    -from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    +from libfsdp import FullyShardedDataParallel as FSDP

    torchrun --nproc-per-node 2 examples/python/fsdp1.py
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from libfsdp import FullyShardedDataParallel as FSDP

dist.init_process_group("gloo")
torch.manual_seed(0)
model = FSDP(
    nn.Transformer(64, 4, 2, 2, 256, dropout=0.0, batch_first=True),
    auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer, nn.TransformerDecoderLayer}),
    device_id=torch.device("cpu"),
    use_orig_params=True,
)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(1 + dist.get_rank())
source, target = torch.randn(2, 4, 16, 64), torch.randn(2, 4, 16, 64)
for step in range(20):
    for i in range(2):  # gradients of the first micro-batch wait for the second's
        with model.no_sync() if i == 0 else contextlib.nullcontext():
            loss = (model(source[i], target[i]) - target[i]).pow(2).mean() / 2
            loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 5 == 4:
        print(f"step {step + 1}: loss {2 * loss.item():.6f}", flush=True)

with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
    state = model.state_dict()
if dist.get_rank() == 0:
    print(f"rank 0 has {len(state)} whole tensors, {sum(value.numel() for value in state.values())} numbers")

dist.destroy_process_group()
