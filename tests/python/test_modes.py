"""Modes of torch_dispatch that a program sets see the program's operators, and none of the engine's."""

import functools

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from harness import on_ranks
from libfsdp import MixedPrecisionPolicy, fully_shard
from subjects import check_training, loss_of, mine, rows, seeded


class Operators(TorchDispatchMode):
    """Lists them."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def blocks():
    return nn.Sequential(*(nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5)) for _ in range(6)))


def sharded(model, **options):
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def operators_of(run):
    with Operators() as seen:
        run()
    return seen.names


@on_ranks(2)
def test_a_mode_sees_the_operators_of_the_model_alone():
    model, reference = sharded(seeded(blocks)), seeded(blocks)
    batch = mine(rows(0, 5))
    for _ in range(3):
        of_model, of_reference = ([] for _ in range(2))
        losses = []
        for module, names in ((model, of_model), (reference, of_reference)):
            names += operators_of(lambda module=module: losses.append(loss_of(module, batch)))
        assert of_model == of_reference
        backward = operators_of(losses[0].backward)
        assert not [name for name in backward if name.startswith("c10d")], backward
        losses[1].backward()
        assert backward.count("aten.mm.default") == operators_of(loss_of(reference, batch).backward).count("aten.mm.default")


@on_ranks(2)
def test_a_mode_sees_no_casts_of_parameters():
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(seeded(blocks), mp_policy=precision)
    for _ in range(2):
        names = operators_of(lambda: loss_of(model, mine(rows(0, 5))).backward())
        assert not [name for name in names if name.startswith(("c10d", "aten._foreach", "aten.copy_", "aten.split"))], names


@on_ranks(2)
def test_a_mode_that_one_hook_enters_is_there_for_the_next_to_leave():
    mode, model, seen = Operators(), sharded(seeded(blocks)), []

    def leave(parameter):
        parameter.grad.neg()
        mode.__exit__(None, None, None)
        seen.append("aten.neg.default" in mode.names)
        mode.names.clear()

    for block in model:
        block.set_all_reduce_hook(lambda gradient: mode.__enter__())
        block[0].weight.register_post_accumulate_grad_hook(leave)
    loss_of(model, mine(rows(0, 5))).backward()
    assert seen == [True] * len(model)


@on_ranks(2)
def test_a_mode_that_one_hook_leaves_is_gone_for_the_next():
    mode, model, left = Operators(), sharded(seeded(blocks)), []

    def leave(parameter):
        if not left:
            left.append(_pop_mode())
        mode.names.clear()
        torch.ones(2).neg()
        assert not mode.names

    for parameter in model[0].parameters():
        parameter.register_post_accumulate_grad_hook(leave)
    loss = loss_of(model, mine(rows(0, 5)))
    with mode:
        loss.backward()  # torch has it back after each node
    assert left == [mode]


class Remembered(nn.Module):
    """Its blocks are run again in backward, but for some of their operators."""

    def __init__(self, policy):
        super().__init__()
        self.blocks = blocks()
        self.contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=self.contexts)
        return x


def all_but_products(context, operator, *args, **kwargs):
    is_product = operator is torch.ops.aten.addmm.default
    return CheckpointPolicy.PREFER_RECOMPUTE if is_product else CheckpointPolicy.PREFER_SAVE


POLICIES = {"products": [torch.ops.aten.addmm.default], "all but products": all_but_products}


@on_ranks(1, 2, 3)
def test_selective_activation_checkpoints():
    """Gathers take place within what is checkpointed, and backward may gather there what forward did not."""
    for policy in POLICIES.values():
        for precision in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.float64)):
            make = functools.partial(Remembered, policy)
            model, reference = seeded(make), seeded(make)
            sharded(model.blocks, mp_policy=precision)
            fully_shard(model, mp_policy=precision)
            for i in range(2, 6):
                model.blocks[i].set_modules_to_backward_prefetch([model.blocks[i - 1], model.blocks[i - 2]])
            check_training(model, reference, loss_of, (5,), exact=precision.param_dtype is None, steps=3)
