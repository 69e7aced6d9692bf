"""Ranks skip a step together, and scale the next one alike."""

import pytest
import torch
import torch.distributed as dist

from fsdp1_subjects import FSDP, wrapped
from harness import on_ranks
from libfsdp.sharded_grad_scaler import ShardedGradScaler
from subjects import loss_of, mine, mlp, rows, seeded

OPTIMIZERS = {
    "one by one": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "fused SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("unscales", (False, True))
@pytest.mark.parametrize("use_orig_params", (False, True))
@on_ranks(2, 3, comm=("shm",))
def test_steps_that_overflow(use_orig_params, unscales):
    for kind, make in OPTIMIZERS.items():
        for overflowing in ((0,), (dist.get_world_size() - 1,), range(dist.get_world_size()), ()):
            model = wrapped(seeded(mlp), FSDP, use_orig_params=use_orig_params)
            optimizer = make(model.parameters())
            scaler = ShardedGradScaler("cpu", init_scale=1024.0)
            others = wrapped(seeded(mlp), FSDP, use_orig_params=use_orig_params)
            unscaled = make(others.parameters())
            for step in range(3):
                what = f"{kind}, {[*overflowing]}, step {step}"
                before = [parameter.detach().clone() for parameter in model.parameters()]
                scaler.scale(loss_of(model, mine(rows(step, 5)))).backward()
                overflows = step == 1 and len(overflowing) > 0
                if overflows and dist.get_rank() in overflowing:
                    next(p.grad for p in model.parameters() if p.grad is not None and p.numel() > 0).fill_(torch.inf)
                if unscales:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                assert scaler.get_scale() == (512.0 if step >= 1 and len(overflowing) > 0 else 1024.0), what
                if overflows:
                    assert all(map(torch.equal, model.parameters(), before)), what
                    continue
                loss_of(others, mine(rows(step, 5))).backward()
                unscaled.step()
                unscaled.zero_grad()
                for mine_now, wanted in zip(model.parameters(), others.parameters(), strict=True):
                    torch.testing.assert_close(mine_now, wanted, msg=what)


@on_ranks(2, comm=("shm",))
def test_a_scaler_that_is_not_enabled():
    model = wrapped(seeded(mlp), FSDP)
    optimizer = OPTIMIZERS["fused AdamW"](model.parameters())
    scaler = ShardedGradScaler("cpu", enabled=False)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    scaler.scale(loss_of(model, mine(rows(0, 5)))).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert not all(map(torch.equal, model.parameters(), before))
