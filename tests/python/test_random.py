"""Random models, units, options and steps: sharded training is unsharded training, whatever comes together.

A failure names its trial's seed and what was drawn until then; `Trial(seed).run()` on as many ranks repeats it.
"""

import copy
import functools
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from harness import on_ranks
from libfsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, _mesh, clip_grad_norm_, fully_shard
from libfsdp import summon_full_params
from subjects import whole

ROWS, LENGTH = 2, 5  # of each rank's batches
TRIALS = 8  # for each number of ranks and means of communication


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), torch.einsum("btd,bte->de", x, gradient)


def linear(width):
    return nn.Linear(width, width)


def look_at(layer, x):
    """One rank alone reads what all have just used."""
    y = F.linear(x, layer.weight)
    if dist.get_rank() == 0:
        with torch.no_grad():
            layer.weight.norm().item()
    return y


LAYERS = {
    "linear": (linear, lambda layer, x: layer(x)),
    "its weight alone": (linear, lambda layer, x: F.linear(x, layer.weight)),
    "its weight alone, and rank 0 looks": (linear, look_at),
    "its weight in two pieces": (
        linear,
        lambda layer, x: torch.cat([x @ piece.t() for piece in layer.weight.split(2)], -1) + layer.bias.unsqueeze(0),
    ),
    "a row of its weight": (linear, lambda layer, x: x * layer.weight[1].view(-1) + layer.weight[:2].sum(0)),
    "its weight's mean": (linear, lambda layer, x: x * layer.bias + layer.weight.mean()),
    "a function of the user": (linear, lambda layer, x: OwnFunction.apply(x, layer.weight)),
    "norm": (nn.LayerNorm, lambda layer, x: layer(x)),
    "embedding": (lambda width: nn.Embedding(7, width), lambda layer, x: x + layer(torch.arange(LENGTH))),
    "attention": (lambda width: nn.MultiheadAttention(width, 1, batch_first=True), lambda layer, x: layer(x, x, x)[0]),
    "transformer": (
        lambda width: nn.TransformerEncoderLayer(width, 1, 2 * width + 1, dropout=0.0, batch_first=True),
        lambda layer, x: layer(x),
    ),
    "lstm": (lambda width: nn.LSTM(width, width, num_layers=2, batch_first=True), lambda layer, x: layer(x)[0]),
    "convolution": (
        lambda width: nn.Conv1d(width, width, 3, padding=1),
        lambda layer, x: layer(x.transpose(1, 2)).transpose(1, 2),
    ),
}


def without_gradients_first(layer, x):
    with torch.no_grad():
        first = layer(x)
    return layer(x) + first


CALLS = {
    "once": lambda layer, x: layer(x),
    "twice": lambda layer, x: layer(torch.tanh(layer(x))),
    "without gradients first": without_gradients_first,
    "checkpointed": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "checkpointed, reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
}


class Layer(nn.Module):
    def __init__(self, width, kind, call):
        super().__init__()
        make, self.read = LAYERS[kind]
        self.layer, self.call = make(width), CALLS[call]

    def forward(self, x):
        return self.call(functools.partial(self.read, self.layer), x)


class Block(nn.Module):
    """Layers and blocks; some are left out in some steps."""

    step = 0

    def __init__(self, parts, every):
        super().__init__()
        self.parts, self.every = nn.ModuleList(parts), every

    def forward(self, x):
        for part, every in zip(self.parts, self.every):
            if Block.step % every == 0:
                x = x / 2 + torch.tanh(part(x))
        return x


def random_model(draw, width, depth=0):
    def part():
        if depth < 2 and draw.random() < 0.35:
            return random_model(draw, width, depth + 1)
        call = draw.choice(list(CALLS)) if draw.random() < 0.3 else "once"
        return Layer(width, draw.choice(list(LAYERS)), call)

    parts = [part() for _ in range(draw.randint(1, 4))]
    return Block(parts, [draw.choice([1] * 8 + [2, 3]) for _ in parts])


def linears(model):
    return [each for each in model.modules() if isinstance(each, nn.Linear)]


def tie_some(draw, model):
    for _ in range(draw.choice([0, 0, 1, 2]) if linears(model) else 0):
        one, other = draw.choices(linears(model), k=2)
        if one.weight.shape == other.weight.shape:
            other.weight = one.weight


def freeze_some(draw, model):
    share = draw.choice([0, 0, 0.2, 0.5])
    for parameter in model.parameters():
        parameter.requires_grad_(draw.random() >= share)


def random_options(draw):
    ranks = dist.get_world_size()
    shards = draw.choice([ranks, draw.choice([n for n in range(1, ranks + 1) if ranks % n == 0])])
    if shards == ranks and draw.random() < 0.7:
        mesh = init_device_mesh("cpu", (shards,))
    else:
        mesh = init_device_mesh("cpu", (ranks // shards, shards), mesh_dim_names=("replicate", "shard"))
    fewer = [n for n in range(1, shards + 1) if shards % n == 0]
    options = dict(mesh=mesh, reshard_after_forward=draw.choice([None, True, False, draw.choice(fewer)]))
    if draw.random() < 0.2:
        options["mp_policy"] = MixedPrecisionPolicy(torch.float32, torch.float64)
    if draw.random() < 0.2:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if draw.random() < 0.3:
        options["shard_placement_fn"] = lambda parameter: Shard(parameter.ndim - 1)
    return options


def shard_some(draw, model, options):
    share = draw.choice([0, 0.3, 0.9])
    for module in reversed(list(model.modules())):
        if module is not model and not isinstance(module, nn.ModuleList) and draw.random() < share:
            fully_shard(module, **options)
    fully_shard(model, **options)


def loss_of(model, batch):
    return model(batch).double().pow(2).mean() + torch.zeros((), requires_grad=True)  # all may be frozen


class Interrupted(Exception):
    pass


class PastAllOperators:
    """An optimizer that is given the memory of the shards, of which the engine sees nothing."""

    def __init__(self, make, parameters):
        self.parameters = list(parameters)
        self.memory = [nn.Parameter(torch.empty_like(each.to_local())) for each in self.parameters]
        self.optimizer = make(self.memory)
        self.state_dict, self.load_state_dict = self.optimizer.state_dict, self.optimizer.load_state_dict

    def step(self):
        for memory, parameter in zip(self.memory, self.parameters):
            memory.data = torch.from_numpy(parameter.detach().to_local().numpy())
            memory.grad = None if parameter.grad is None else parameter.grad.to_local()
        self.optimizer.step()

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None


class Trial:
    """One model, trained for some steps beside its unsharded twin, with something else in between."""

    def __init__(self, seed):
        self.seed, self.draw, self.drawn = seed, random.Random(seed), []

    def run(self):
        torch.manual_seed(self.seed)
        self.make()
        self.set_some()
        self.past_operators = self.draw.random() < 0.4
        self.note("past all operators:", self.past_operators)
        self.make_optimizers()
        between = [self.evaluate, self.interrupt, self.copy, self.load, self.freeze_or_thaw]
        between += [self.write, self.replace, self.unshard]
        for step in range(self.draw.randint(2, 6)):
            if self.draw.random() < 0.7:
                event = self.draw.choice(between)
                self.note(event.__name__)
                event()
            self.train(step)

    def make(self):
        self.width = self.draw.choice([3, 4, 5, 8])
        self.model = random_model(self.draw, self.width).double()
        tie_some(self.draw, self.model)
        freeze_some(self.draw, self.model)
        self.reference = copy.deepcopy(self.model)
        options = random_options(self.draw)
        self.tolerance = dict(rtol=1e-3, atol=1e-4) if "mp_policy" in options else dict(rtol=1e-8, atol=1e-10)
        self.note(self.model, options)
        shard_some(self.draw, self.model, options)
        self.note("units:", [path for path, each in self.model.named_modules() if isinstance(each, FSDPModule)])

    def note(self, *what):
        self.drawn.append(" ".join(map(str, what)))

    def units(self):
        return [each for each in self.model.modules() if isinstance(each, FSDPModule)]

    def set_some(self):
        draw, model = self.draw, self.model
        self.zeros, self.divisor = draw.random() < 0.2, draw.choice([None, None, 3.0])
        model.set_reduce_scatter_unused_params(self.zeros)
        self.stays_whole = draw.random() >= 0.8
        model.set_reshard_after_backward(not self.stays_whole)
        model.set_reduce_scatter_max_input_buffers(draw.choice([1, 2, 3]))
        model.set_separate_reduce_scatter_group(draw.random() < 0.2)
        for unit in self.units():
            unit.set_gradient_divide_factor(self.divisor)
            if draw.random() < 0.2:
                unit.set_modules_to_forward_prefetch(draw.choices(self.units(), k=2))
                unit.set_modules_to_backward_prefetch(draw.choices(self.units(), k=2))
        draw.choice(self.units()).set_unshard_in_backward(draw.random() < 0.5)

    def make_optimizers(self):
        kind = self.draw.choice([dict(foreach=False), dict(foreach=True), dict(fused=True)])
        make = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-2, **kind)
        ours = functools.partial(PastAllOperators, make) if self.past_operators else make
        self.optimizer, self.reference_optimizer = ours(self.model.parameters()), make(self.reference.parameters())

    def keep_optimizers(self):
        """For other parameters of the same values."""
        states = [each.state_dict() for each in (self.optimizer, self.reference_optimizer)]
        self.make_optimizers()
        self.optimizer.load_state_dict(states[0])
        self.reference_optimizer.load_state_dict(states[1])

    def batch(self, step, micro, rank=None):
        rank = dist.get_rank() if rank is None else rank
        generator = torch.Generator().manual_seed(self.seed * 10000 + step * 100 + micro * 10 + rank)
        return torch.randn(ROWS, LENGTH, self.width, generator=generator, dtype=torch.float64)

    # Between two steps.

    def evaluate(self):
        training, no_grad = self.draw.random() < 0.5, self.draw.choice([torch.no_grad, torch.inference_mode])
        results = []
        for each in (self.model, self.reference):
            each.train(training)
            with no_grad():
                results.append(loss_of(each, self.batch(90, 0)).item())
            each.train()
        torch.testing.assert_close(*results, **self.tolerance)

    def interrupt(self):
        def raise_it(*_):
            raise Interrupted

        module = self.draw.choice(list(self.model.modules()))
        hook = self.draw.choice([module.register_forward_hook, module.register_full_backward_hook])(raise_it)
        try:
            loss_of(self.model, self.batch(91, 0)).backward()
        except Interrupted:
            pass
        hook.remove()
        self.model.reset_iter_state()
        self.model.zero_grad()

    def copy(self):
        twin = copy.deepcopy(self.model)
        if self.draw.random() < 0.5:
            self.model = twin
            self.keep_optimizers()

    def load(self):
        assign = self.draw.random() < 0.5
        self.model.load_state_dict({name: value.clone() for name, value in self.model.state_dict().items()}, assign=assign)
        if assign:
            self.keep_optimizers()

    def freeze_or_thaw(self):
        path = self.draw.choice([path for path, _ in self.model.named_parameters()])
        self.note(path)
        for each in (self.model, self.reference):
            parameter = dict(each.named_parameters())[path]
            parameter.requires_grad_(not parameter.requires_grad)

    def write(self):
        with summon_full_params(self.model), torch.no_grad():
            for parameter in [*self.model.parameters(), *self.reference.parameters()]:
                parameter.mul_(0.9)

    def replace(self):
        """A weight, in all places if it is tied."""
        paths = [path for path, each in self.reference.named_modules() if isinstance(each, nn.Linear)]
        if not paths:
            return
        path = self.draw.choice(paths)
        former = self.reference.get_submodule(path).weight
        fresh = nn.Parameter(torch.randn_like(former) / self.width, former.requires_grad)
        for each in linears(self.reference):
            if each.weight is former:
                each.weight = fresh
        self.model.get_submodule(path).weight = nn.Parameter(fresh.detach().clone(), former.requires_grad)
        self.evaluate()  # from which on `parameters()` has it
        self.make_optimizers()

    def unshard(self):
        handle = self.draw.choice(self.units()).unshard(async_op=self.draw.random() < 0.5)
        if handle is not None and self.draw.random() < 0.5:
            handle.wait()
        self.draw.choice(self.units()).reshard()

    # A step.

    def train(self, step):
        Block.step = step
        micros, how = self.draw.randint(1, 3), self.draw.choice(["each", "no sync", "no all-reduce", "at once"])
        self.note(step, micros, how)
        losses = self.backward(step, micros, how)
        torch.testing.assert_close(losses, self.reference_backward(step, micros), **self.tolerance)
        self.check_gradients()
        if self.draw.random() < 0.3:
            clip = self.draw.choice([clip_grad_norm_, nn.utils.clip_grad_norm_])
            norms = clip(self.model.parameters(), 0.01), nn.utils.clip_grad_norm_(self.reference.parameters(), 0.01)
            torch.testing.assert_close(*(whole(norm).item() for norm in norms), **self.tolerance)
        if self.past_operators and self.stays_whole:
            self.model.note_shard_writes()  # what stays whole may be read again in an evaluation
        self.optimizer.step(), self.reference_optimizer.step()
        self.check_same({name: (p.detach(), q.detach()) for name, p, q in self.pairs()})
        self.optimizer.zero_grad(), self.reference_optimizer.zero_grad()

    def backward(self, step, micros, how):
        if how == "at once":
            losses = [loss_of(self.model, self.batch(step, micro)) for micro in range(micros)]
            sum(losses).backward()
            return [loss.item() for loss in losses]
        losses = []
        for micro in range(micros):
            last = micro == micros - 1
            self.model.set_is_last_backward(last)
            self.model.set_requires_gradient_sync(last or how != "no sync")
            self.model.set_requires_all_reduce(last or how != "no all-reduce")
            loss = loss_of(self.model, self.batch(step, micro))
            loss.backward()
            losses.append(loss.item())
        return losses

    def reference_backward(self, step, micros):
        mine = []
        for rank in range(dist.get_world_size()):
            for micro in range(micros):
                loss = loss_of(self.reference, self.batch(step, micro, rank))
                loss.backward()
                mine += [loss.item()] if rank == dist.get_rank() else []
        for parameter in self.reference.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(self.divisor or dist.get_world_size())
        return mine

    def pairs(self):
        ours, theirs = dict(self.model.named_parameters()), dict(self.reference.named_parameters())
        assert list(ours) == list(theirs)
        return [(name, parameter, theirs[name]) for name, parameter in ours.items()]

    def check_gradients(self):
        both = {}
        for name, parameter, reference in self.pairs():
            if self.zeros and parameter.grad is not None and reference.grad is None:
                reference.grad = torch.zeros_like(reference)
            assert (parameter.grad is None) == (reference.grad is None), f"gradient of {name}"
            if parameter.grad is not None:
                both[name] = (parameter.grad, reference.grad)
        self.check_same(both)

    def check_same(self, both):
        for name, (ours, theirs) in both.items():
            assert isinstance(ours, DTensor)
            torch.testing.assert_close(whole(ours), theirs, msg=lambda text: f"{name}: {text}", **self.tolerance)


@on_ranks(1, 2, 3, 4)
def test_random_trials():
    first = 1000 * dist.get_world_size() + 500 * _mesh._shared_memory
    for seed in range(first, first + TRIALS):
        trial = Trial(seed)
        try:
            trial.run()
        except Exception as error:
            drawn = "\n".join(trial.drawn)
            raise AssertionError(f"trial {seed}:\n{drawn}\n{error}") from error
