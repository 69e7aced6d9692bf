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


class UnscalesItself(torch.optim.SGD):
    """As optimizers that are given the scaler do."""

    _step_supports_amp_scaling = True

    def step(self, grad_scaler):
        found = grad_scaler._check_inf_per_device(self)
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None and not found[parameter.grad.device]:
                parameter.grad.div_(grad_scaler._get_scale_async())
        super().step() if not sum(found.values()) else None


@on_ranks(2, comm=("shm",))
def test_an_optimizer_that_unscales_itself():
    parameter, plain = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer, scaler = UnscalesItself([parameter], lr=0.5), ShardedGradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        gradient = torch.full((3,), 0.25)
        scaler.scale(torch.zeros(()))
        parameter.grad = gradient * scaler.get_scale()
        if step == 1 and dist.get_rank() == 1:
            parameter.grad[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        plain.data -= 0.5 * gradient if step != 1 else 0
        assert torch.equal(parameter, plain), step


@on_ranks(2, comm=("shm",))
def test_fused_optimizers_unscale_small_halves_in_more_digits():
    """Unscaled, they would be zeros."""
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = torch.optim.SGD([parameter], lr=2.0**26, fused=True)
    scaler = ShardedGradScaler("cpu", init_scale=65536.0)
    scaler.scale(torch.zeros(()))
    parameter.grad = torch.full((3,), 2.0**-14, dtype=torch.float16)
    scaler.step(optimizer)
    assert parameter.tolist() == [1 - 2.0**-4] * 3


@on_ranks(2, comm=("shm",))
def test_a_rank_without_gradients():
    for rank_without in range(2):
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        scaler = ShardedGradScaler("cpu", init_scale=1024.0)
        scaler.scale(torch.zeros(()))
        if dist.get_rank() != rank_without:
            parameter.grad = torch.full((3,), torch.inf)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 512.0 and torch.equal(parameter, torch.ones(3))
