"""Random models, units, options and steps: sharded training is unsharded training, whatever comes together.

Of a number of ranks over a means of communication, a seed alone decides what a trial is. A failure says what was drawn
until then, and how to repeat it: FSDP_TRIALS_SEED=2503 FSDP_TRIALS=1 pytest tests/python/test_random.py -k "trials[2-shm]"
"""

import copy
import functools
import os
import random
import signal
import tempfile
import traceback

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from harness import on_ranks
from libfsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, _mesh, clip_grad_norm_, fully_shard
from libfsdp import Error, summon_full_params
from random_models import LENGTH, ROWS, Block, Interrupted, Layer, OwnFunction, freeze_some, has_call, has_kind
from random_models import has_ties, linears, random_model, tie_some
from subjects import assert_whole_is, whole

TRIALS = {1: 3, 2: 5, 3: 4, 4: 4}  # by number of ranks, for each means of communication
SMALLEST = dict(rtol=1e-8, atol=1e-10)  # where additions have no one order
LOSSES = ["plain"] * 4 + ["two forwards, two backwards", "a graph that is kept"]
PENALTIES = ["a penalty on the input's gradient", "a penalty on weights' gradients"]


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


def backwards(kind, model, batch, after_each):
    """The losses. `after_each` is called after each backward."""
    if kind == "two forwards, two backwards":
        losses = [loss_of(model, batch), loss_of(model, batch * 2)]
        for loss in losses:
            loss.backward()
            after_each()
        return losses
    if kind == "a graph that is kept":
        loss = loss_of(model, batch)
        loss.backward(retain_graph=True)
        after_each()
    elif kind in PENALTIES:
        batch = batch.requires_grad_()
        loss = loss_of(model, batch)
        to = [batch] if kind == PENALTIES[0] else [each.weight for each in linears(model)[:3]] + [batch]
        to = [each for each in to if each.requires_grad]
        slopes = torch.autograd.grad(loss, to, create_graph=True, allow_unused=True)
        loss = loss + sum(slope.double().pow(2).sum() for slope in slopes if slope is not None)
    else:
        loss = loss_of(model, batch)
    loss.backward()
    after_each()
    return [loss]


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


def status_of_child(body):
    """Of a forked child that runs `body`, with what it said."""
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            os.dup2(said.fileno(), 2)
            signal.alarm(60)  # a child that hangs is a failure
            try:
                body()
                os._exit(0)
            except Error as error:
                os.write(2, str(error).encode())
                os._exit(3)
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(4)
        status = os.waitpid(child, 0)[1]
        said.seek(0)
        return status, said.read().decode()


class Companion:
    """Another model, of one unit on a mesh of its own, that is trained in between."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        ranks, rank = dist.get_world_size(), dist.get_rank()
        groups = [list(range(0, ranks, 2)), list(range(1, ranks, 2))] if seed % 2 and ranks > 1 else [list(range(ranks))]
        made = [dist.new_group(each) for each in groups]
        (self.ranks, group), *_ = [pair for pair in zip(groups, made) if rank in pair[0]]
        self.model = nn.Linear(4, 3).double()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        self.reference = copy.deepcopy(self.model)
        fully_shard(self.model, mesh=DeviceMesh.from_group(group, "cpu"))

    @staticmethod
    def batch(step, rank):
        generator = torch.Generator().manual_seed(step * 10 + rank)
        return torch.randn(2, 4, generator=generator, dtype=torch.float64)

    def forward(self, step):
        self.step, self.loss = step, self.model(self.batch(step, dist.get_rank())).pow(2).mean()

    def finish(self):
        self.loss.backward()
        for rank in self.ranks:
            self.reference(self.batch(self.step, rank)).pow(2).mean().backward()
        for ours, theirs in zip(self.model.parameters(), self.reference.parameters()):
            torch.testing.assert_close(whole(ours.grad), theirs.grad / len(self.ranks), **SMALLEST)
            with torch.no_grad():
                ours.sub_(ours.grad, alpha=0.125)
                theirs.sub_(theirs.grad / len(self.ranks), alpha=0.125)
            ours.grad = theirs.grad = None
        with torch.no_grad():
            self.model(self.batch(self.step, 0))  # after which the next forward waits for no writer


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
        between = [self.evaluate, self.copy, self.load, self.drop]
        between += [] if self.ranks_differ else [self.interrupt, self.freeze_or_thaw]
        between += [self.write, self.write_raw, self.replace, self.unshard, self.look, self.read, self.fork]
        for step in range(self.draw.randint(2, 6)):
            while self.draw.random() < 0.5:
                event = self.draw.choice(between)
                self.note(event.__name__)
                event()
            self.train(step)

    def make(self):
        self.width = self.draw.choice([3, 4, 5, 8])
        options = random_options(self.draw)
        self.casts, self.zeros = "mp_policy" in options, self.draw.random() < 0.2
        self.is_hybrid = options["mesh"].ndim == 2
        self.replicas = options["mesh"].size(0) if self.is_hybrid else 1
        # Where a gather asks nobody, ranks may do without what others use, and look at parameters alone.
        self.asks_nobody = not self.casts and _mesh._shared_memory
        self.ranks_differ = self.asks_nobody and self.zeros
        self.model = random_model(self.draw, self.width, self.ranks_differ).double()
        tie_some(self.draw, self.model)
        freeze_some(self.draw, self.model)
        if self.ranks_differ:  # one that uses nothing that is trained does not know of a step
            self.model.begin_with(Layer(self.width, "linear", "once").double())
        self.reference = copy.deepcopy(self.model)
        self.kind = self.draw.choice([dict(foreach=False), dict(foreach=True), dict(fused=True)])
        self.clips = self.draw.random() < 0.3
        exact = self.asks_nobody and "fused" not in self.kind and not self.clips
        self.tolerance = dict(rtol=1e-3, atol=1e-4) if self.casts else dict(rtol=0, atol=0) if exact else SMALLEST
        self.note(self.model, options, self.kind, "clips:", self.clips, "zeros:", self.zeros)
        shard_some(self.draw, self.model, options)
        self.note("units:", [path for path, each in self.model.named_modules() if isinstance(each, FSDPModule)])
        self.companion = Companion(self.draw.randrange(100)) if self.draw.random() < 0.3 else None

    def note(self, *what):
        self.drawn.append(" ".join(map(str, what)))

    def units(self):
        return [each for each in self.model.modules() if isinstance(each, FSDPModule)]

    def set_some(self):
        draw, model = self.draw, self.model
        self.divisor = draw.choice([None, None, 3.0])
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
        make = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-2, **self.kind)
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
        """An exception in a forward or backward, of a hook or a function; in a forward perhaps on one rank only."""

        def raise_it(*_):
            if not alone or dist.get_rank() == 0:
                raise Interrupted

        module = self.draw.choice(list(self.model.modules()))
        how = self.draw.choice(["forward", "forward", "backward", "function"])
        alone = how == "forward" and self.asks_nobody and self.draw.random() < 0.5
        kept = self.draw.random() < 0.3
        self.note(how, "alone:", alone)
        if how == "function":
            OwnFunction.raises = True
        else:
            hook = module.register_forward_hook if how == "forward" else module.register_full_backward_hook
            hook = hook(raise_it)
        try:
            loss = loss_of(self.model, self.batch(91, 0))
            if not alone:
                loss.backward(retain_graph=kept)
        except Interrupted:
            pass
        finally:
            OwnFunction.raises = False
            if how != "function":
                hook.remove()
        self.model.reset_iter_state()
        self.model.zero_grad()

    def drop(self):
        loss_of(self.model, self.batch(92, 0))
        self.model.reset_iter_state()

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
        through_member = self.draw.random() < 0.3
        self.note(path, "through the member:", through_member)
        for each in (self.model, self.reference):
            parameter = dict(each.named_parameters())[path]
            wanted = not parameter.requires_grad
            module, _, name = path.rpartition(".")
            member = getattr(each.get_submodule(module), name)
            (member if through_member else parameter).requires_grad_(wanted)
            parameter.grad = None

    def write(self):
        kept = self.draw.random() < 0.5
        with summon_full_params(self.model, writeback=kept), torch.no_grad():
            self.check_whole()
            for parameter in [*self.model.parameters(), *(self.reference.parameters() if kept else [])]:
                parameter.mul_(0.75)

    def write_raw(self):
        self.model.note_shard_writes()
        for parameter in self.model.parameters():
            values = parameter.detach().to_local().numpy()
            values *= 0.75
        with torch.no_grad():
            for parameter in self.reference.parameters():
                parameter.mul_(0.75)

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

    def look(self):
        """One rank alone at what may have been written just before, by all."""
        layers, rank = linears(self.model), self.draw.randrange(dist.get_world_size())
        if self.asks_nobody and layers:
            index = self.draw.randrange(len(layers))
            if self.barrier_of_units() and dist.get_rank() == rank:
                with torch.no_grad():
                    ours, theirs = layers[index].weight.norm(), linears(self.reference)[index].weight.norm()
                torch.testing.assert_close(ours, theirs, **self.tolerance)

    def barrier_of_units(self):
        """After it none of the ranks is in the midst of writing."""
        with torch.no_grad():
            loss_of(self.model, self.batch(93, 0))
        dist.barrier()
        return True

    def read(self):
        """The whole, as checkpoints do."""
        self.check_whole({name: whole(value) for name, value in self.model.state_dict().items()})

    def check_whole(self, wholes=None):
        wholes = wholes or dict(self.model.named_parameters())
        for name, parameter in self.reference.named_parameters():
            torch.testing.assert_close(
                wholes[name].detach(), parameter.detach(), msg=lambda text: f"{name}: {text}", **self.tolerance
            )

    def fork(self):
        """A child that works by itself; or that touches a shard, which ends it, and the training goes on."""
        kept = [value.to_local().clone() for value in self.model.state_dict().values()]
        sums = [float(each.sum()) for each in kept]

        def check_sums():
            assert [float(each.sum()) for each in kept] == sums

        status, said = status_of_child(check_sums)
        assert status == 0, f"a child ended with {status}: {said}"
        mine = [each for each in self.model.parameters() if each.to_local().numel()]
        if _mesh._shared_memory and dist.get_world_size() > 1 and mine and self.replicas < dist.get_world_size():
            status, said = status_of_child(lambda: mine[0].to_local().sum().item())
            assert "a forked child" in said, f"a child that read a shard ended with {status}: {said}"
            assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 3

    # A step.

    def train(self, step):
        Block.step, Block.rank = step, dist.get_rank()
        micros, how = self.draw.randint(1, 3), self.draw.choice(["each", "no sync", "no all-reduce", "at once"])
        may_recompute = has_call(self.model, "checkpointed")
        losses = LOSSES + ([] if may_recompute or has_kind(self.model, "transformer") else PENALTIES)
        kinds = [self.draw.choice(losses[:-3] if may_recompute else losses) for _ in range(micros)]
        self.note(step, micros, how, "" if how == "at once" else kinds)
        by_parts = has_call(self.model, "reentrant") and (micros > 1 or has_ties(self.model))
        if by_parts and self.tolerance["rtol"] == 0:
            self.tolerance = SMALLEST  # a segment is a backward of its own, after which a unit is reduced by itself
        seen = self.backward(step, kinds, how)
        expected = self.reference_backward(step, kinds, how)
        torch.testing.assert_close(seen, expected, **self.tolerance)
        self.check_gradients()
        if self.clips and self.draw.random() < 0.7:
            clip = self.draw.choice([clip_grad_norm_, nn.utils.clip_grad_norm_])
            norms = clip(self.model.parameters(), 0.01), nn.utils.clip_grad_norm_(self.reference.parameters(), 0.01)
            torch.testing.assert_close(*(whole(norm).item() for norm in norms), **self.tolerance)
        if self.past_operators and self.stays_whole:
            self.model.note_shard_writes()  # what stays whole may be read again in an evaluation
        self.optimizer.step(), self.reference_optimizer.step()
        self.check_same({name: (p.detach(), q.detach()) for name, p, q in self.pairs()})
        self.optimizer.zero_grad(), self.reference_optimizer.zero_grad()

    def companions(self, step):
        """Its forward is before this model's on some ranks, and after it on others, where gathers ask nobody."""
        if self.companion is None:
            return lambda: None, lambda: None
        first = self.draw.random() < 0.5
        before = first if not self.asks_nobody else (dist.get_rank() % 2 == 0) == first
        go, nothing = functools.partial(self.companion.forward, step), lambda: None
        return (go, nothing) if before else (nothing, go)

    def backward(self, step, kinds, how):
        before, after = self.companions(step)
        before()
        losses = []
        if how == "at once":
            losses = [loss_of(self.model, self.batch(step, micro)) for micro in range(len(kinds))]
            after()
            sum(losses).backward()
        else:
            for micro, kind in enumerate(kinds):
                last = micro == len(kinds) - 1
                self.model.set_is_last_backward(last)
                self.model.set_requires_gradient_sync(last or how != "no sync")
                self.model.set_requires_all_reduce(last or how != "no all-reduce")
                losses += backwards(kind, self.model, self.batch(step, micro), lambda: None)
            after()
        if self.companion is not None:
            self.companion.finish()
        return [loss.item() for loss in losses]

    def reference_backward(self, step, kinds, how):
        """Reduced as units do it, in the order of the ranks."""
        mine, gradients, parameters = [], [], list(self.reference.parameters())
        former = [parameter.grad for parameter in parameters]

        def take():
            gradients[-1].append([parameter.grad for parameter in parameters])
            for parameter in parameters:
                parameter.grad = None

        for rank in range(dist.get_world_size()):
            Block.rank = rank
            gradients.append([])
            take()
            gradients[-1].clear()
            batches = [self.batch(step, micro, rank) for micro in range(len(kinds))]
            if how == "at once":
                losses = [loss_of(self.reference, batch) for batch in batches]
                sum(losses).backward()
                take()
                of_backward = [0]
            else:
                losses, of_backward = [], []
                for micro, kind in enumerate(kinds):
                    losses += backwards(kind, self.reference, batches[micro], take)
                    of_backward += [micro] * (len(gradients[-1]) - len(of_backward))
            mine += [loss.item() for loss in losses] if rank == dist.get_rank() else []
        Block.rank = dist.get_rank()
        last = [how == "at once" or micro == len(kinds) - 1 for micro in of_backward]
        for index, parameter in enumerate(parameters):
            of_rank = [[backward[index] for backward in of_rank] for of_rank in gradients]
            parameter.grad = plus(former[index], self.reduced(of_rank, last, how))
        return mine

    def reduced(self, gradients, last, how):
        """By rank and backward, of one parameter."""
        ranks = dist.get_world_size()
        shards, divisor = ranks // self.replicas, self.divisor or ranks
        total, waiting, put_off = None, [None] * ranks, [None] * self.replicas
        for backward, is_last in enumerate(last):
            for rank in range(ranks):
                waiting[rank] = plus(waiting[rank], gradients[rank][backward])
            if how == "no sync" and not is_last:
                continue
            sums = [add(waiting[first : first + shards]) for first in range(0, ranks, shards)]
            waiting = [None] * ranks
            if self.is_hybrid:
                sums = [plus(one, other) for one, other in zip(sums, put_off)]
                put_off = [None] * self.replicas
                if how == "no all-reduce" and not is_last:
                    put_off = sums
                    continue
            whole_sum = add(sums)
            total = plus(total, None if whole_sum is None else whole_sum / divisor)
        return total

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
            assert_whole_is(ours, theirs, msg=lambda text: f"{name}: {text}", **self.tolerance)


def plus(sum, next):
    return sum if next is None else next if sum is None else sum + next


def add(tensors):
    return functools.reduce(plus, tensors, None)


@on_ranks(1, 2, 3, 4)
def test_random_trials():
    ranks, means = dist.get_world_size(), "shm" if _mesh._shared_memory else "gloo"
    first = int(os.environ.get("FSDP_TRIALS_SEED", 1000 * ranks + 500 * _mesh._shared_memory))
    for seed in range(first, first + int(os.environ.get("FSDP_TRIALS", TRIALS[ranks]))):
        trial = Trial(seed)
        try:
            trial.run()
        except Exception as error:
            drawn = "\n".join(trial.drawn)
            again = f"FSDP_TRIALS_SEED={seed} FSDP_TRIALS=1 pytest tests/python/test_random.py -k 'trials[{ranks}-{means}]'"
            raise AssertionError(f"{again}\n{drawn}\n{error}") from error
