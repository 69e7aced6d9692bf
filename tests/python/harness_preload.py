"""What the server that forks the ranks has imported, so that they start at once."""

import gc

import pytest  # noqa: F401
import torch  # noqa: F401
import torch.distributed.checkpoint  # noqa: F401
import torch.distributed.checkpoint.state_dict  # noqa: F401
import torch.distributed.fsdp  # noqa: F401
import torch.distributed.tensor.debug  # noqa: F401
import torch.distributed.tensor.parallel  # noqa: F401

import libfsdp  # noqa: F401
import on_gpus

if not on_gpus.WANTED:  # they look for a GPU, which the ranks then could not use
    import fsdp1_flat_subjects  # noqa: F401
    import subclasses  # noqa: F401

torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()  # brings in what optimizers import at first use
gc.collect()
gc.freeze()  # a rank's collections look at what the rank has made, not at all of PyTorch again
