"""Random models for the random trials: blocks of layers and blocks, each used in some way."""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

ROWS, LENGTH = 2, 5  # of each rank's batches


class Interrupted(Exception):
    pass


class OwnFunction(torch.autograd.Function):
    """Alone uses its weight, as fused layers do."""

    raises = False

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        if OwnFunction.raises:
            raise Interrupted
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
        self.layer, self.call, self.kind, self.name_of_call = make(width), CALLS[call], kind, call

    def extra_repr(self):
        return f"{self.kind}, {self.name_of_call}"

    def forward(self, x):
        return self.call(functools.partial(self.read, self.layer), x)


class Block(nn.Module):
    """Layers and blocks; some are left out in some steps, or by some ranks."""

    step = rank = 0

    def __init__(self, parts, every, ranks):
        super().__init__()
        self.parts, self.every, self.ranks = nn.ModuleList(parts), every, ranks

    def begin_with(self, part):
        """Used by all, always."""
        self.parts.insert(0, part)
        self.every, self.ranks = [1, *self.every], [1, *self.ranks]

    def forward(self, x):
        for part, every, ranks in zip(self.parts, self.every, self.ranks):
            if Block.step % every == 0 and Block.rank % ranks == 0:
                x = x / 2 + torch.tanh(part(x))
        return x


def random_model(draw, width, ranks_differ, depth=0):
    def part():
        if depth < 2 and draw.random() < 0.35:
            return random_model(draw, width, ranks_differ, depth + 1)
        call = draw.choice(list(CALLS)) if draw.random() < 0.3 else "once"
        return Layer(width, draw.choice(list(LAYERS)), call)

    parts = [part() for _ in range(draw.randint(1, 4))]
    every = [draw.choice([1] * 8 + [2, 3]) for _ in parts]
    return Block(parts, every, [draw.choice([1, 1, 2, 3]) if ranks_differ else 1 for _ in parts])


def has_call(model, text):
    return any(text in each.name_of_call for each in model.modules() if isinstance(each, Layer))


def has_kind(model, kind):
    return any(each.kind == kind for each in model.modules() if isinstance(each, Layer))


def has_ties(model):
    weights = [id(each.weight) for each in linears(model)]
    return len(set(weights)) < len(weights)


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
