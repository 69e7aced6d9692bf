"""Runs that are saved and loaded: a model in each form in which it may be, with its optimizer."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType

import libfsdp
from fsdp1_subjects import quietly
from libfsdp import FullyShardedDataParallel, fully_shard
from subjects import loss_of, mine, rows, seeded, whole


class Odd(nn.Module):
    """Of odd sizes, with a tied weight, a buffer, and one that is not saved."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(5, 7), nn.LayerNorm(7)
        self.block = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 7))
        self.block[2].bias = self.first.bias
        self.last = nn.Linear(7, 3)
        self.register_buffer("count", torch.randint(100, ()))
        self.register_buffer("unsaved", torch.ones(2), persistent=False)

    def forward(self, x):
        return self.last(self.block(self.norm(self.first(x))))


def sharded_by(shard):
    def form(model):
        shard(model.block)
        shard(model)
        return model

    return form


def wrapped(use_orig_params):
    def form(model):
        model.block = quietly(FullyShardedDataParallel, model.block, use_orig_params=use_orig_params)
        return quietly(FullyShardedDataParallel, model, use_orig_params=use_orig_params)

    return form


FORMS = {
    "plain": lambda model: model,
    "fully_shard": sharded_by(fully_shard),
    "wrapped": wrapped(True),
    "flat": wrapped(False),
}


class Run:
    def __init__(self, form, seed=1, make=Odd, **options):
        self.form, self.model = form, FORMS[form](seeded(make, seed))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **{"lr": 1e-2, **options})

    def step(self, number):
        batch = rows(number, 5)
        loss = loss_of(self.model, batch if self.form == "plain" else mine(batch))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def save(self, folder, **options):
        path = libfsdp.save(folder, self.model, self.optimizer, **options)
        dist.barrier()
        return path

    def values(self):
        """Whole, by name: not through what is tested."""
        if isinstance(self.model, FullyShardedDataParallel):
            kind = FullyShardedDataParallel.state_dict_type(
                self.model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
            )
            with kind:
                state = quietly(self.model.state_dict)
                optimizer = quietly(FullyShardedDataParallel.optim_state_dict, self.model, self.optimizer)["state"]
        else:
            state = {name: whole(value) for name, value in self.model.state_dict().items()}
            names = {parameter: name for name, parameter in self.model.named_parameters()}
            optimizer = {
                names[parameter]: {key: whole(value) for key, value in each.items()}
                for parameter, each in self.optimizer.state.items()
            }
        states = {f"{name} {key}": value for name, each in optimizer.items() for key, value in each.items()}
        return {**state, **states}


def check_same(got, wanted, what=""):
    assert got.keys() == wanted.keys(), what
    for name, value in wanted.items():
        same = torch.equal(got[name], value) if isinstance(value, torch.Tensor) else got[name] == value
        assert same, f"{what} {name}: {got[name]} instead of {value}"
