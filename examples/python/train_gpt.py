"""Trains a small GPT on the bytes of a text: the model, data and schedule of examples/train_gpt, in Python.

    torchrun --nproc-per-node 2 examples/python/train_gpt.py --data README.md --steps 100

From one seed both programs start from the same weights and see the same batches.
"""

import argparse
import json
import math
import pathlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import libfsdp
from libfsdp import MixedPrecisionPolicy, fully_shard

VOCABULARY = 256  # one token per byte
HELD_BACK = 0.05
MASK = (1 << 64) - 1


def rotation_table(positions: int, pairs: int) -> torch.Tensor:
    frequency = torch.pow(10000.0, -torch.arange(pairs, dtype=torch.float32) / pairs)
    angle = torch.outer(torch.arange(positions, dtype=torch.float32), frequency)
    return torch.stack((angle.cos(), angle.sin()), -1)


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Turns each pair of features by an angle that grows with the position."""
    first, second = x.chunk(2, -1)
    cosine, sine = table.select(-1, 0).to(x.dtype), table.select(-1, 1).to(x.dtype)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), -1)


class Linear(nn.Linear):
    """Rounds as LibTorch's Linear does, which adds the bias in a step of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.matmul(self.weight.t()).add_(self.bias)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = Linear(width, 3 * width), Linear(width, width)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(query, rotation), rotate(key, rotation), value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.widen, self.narrow = Linear(width, 4 * width), Linear(4 * width, width)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.narrow(F.gelu(self.widen(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, sequence: int):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.register_buffer("rotation", rotation_table(sequence, width // heads // 2))
        with torch.no_grad():
            self.embedding.weight.normal_(0, 0.02)
            for block in self.blocks:
                block.attention.out.weight.mul_(1 / math.sqrt(2.0 * layers))
                block.narrow.weight.mul_(1 / math.sqrt(2.0 * layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.rotation[: tokens.size(1)])
        return self.norm(x).matmul(self.embedding.weight.t())  # the same weights read and write bytes

    def loss(self, tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(tokens).flatten(0, 1).float(), following.flatten())


class AdamW(torch.optim.Optimizer):
    """With the kernel of the C++ trainer, so that every bit agrees. PyTorch's own optimizers work as well."""

    def __init__(self, params, lr: float, betas: tuple[float, float], weight_decay: float, eps: float = 1e-8):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay, eps=eps))

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            params = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in params:
                state = self.state[parameter]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(parameter), square=torch.zeros_like(parameter))
                state["step"] += 1
            self.update(params, group)

    def update(self, params: list[torch.Tensor], group: dict) -> None:
        states = [self.state[parameter] for parameter in params]
        torch.ops.fsdp.fused_adamw_(
            [parameter.to_local() for parameter in params],
            [parameter.grad.to_local() for parameter in params],
            [state["mean"].to_local() for state in states],
            [state["square"].to_local() for state in states],
            [],
            [state["step"] for state in states],
            group["lr"],
            *group["betas"],
            group["weight_decay"],
            group["eps"],
        )


def scatter(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def mix(value: int, more: int) -> int:
    return scatter(value ^ scatter(more))


class Batches:
    """Rows of a text, chosen by seed, step and rank alone."""

    def __init__(self, text: bytes, sequence: int):
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.sequence = sequence
        self.split = int((1 - HELD_BACK) * len(text))

    def training(self, seed: int, index: int, rank: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        key = mix(mix(mix(0, seed), index), rank)
        starts = [mix(key, row) % (self.split - self.sequence) for row in range(rows)]
        cut = torch.stack([self.text[start : start + self.sequence + 1] for start in starts]).long()
        return cut[:, :-1].contiguous(), cut[:, 1:].contiguous()


def learning_rate(step: int, options: argparse.Namespace) -> float:
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    progress = (step - options.warmup) / max(options.steps - options.warmup, 1)
    return options.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=pathlib.Path, required=True, help="a text")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank")
    parser.add_argument("--lr", type=float, default=0.0, help="highest learning rate; 0: half of one over the width")
    parser.add_argument("--warmup", type=int, default=40)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bfloat16", action="store_true", help="compute in bfloat16, reduce in float32")
    parser.add_argument("--json", type=pathlib.Path, help="where to write the losses")
    options = parser.parse_args()
    options.lr = options.lr or 0.5 / options.width
    return options


def shard(model: GPT, options: argparse.Namespace) -> None:
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = low if options.bfloat16 else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def main() -> None:
    options = parse_options()
    dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(options.seed)  # every rank builds the same model
    model = GPT(options.width, options.layers, options.heads, options.seq)
    shard(model, options)
    if rank == 0:
        print(libfsdp.describe(model))
    optimizer = AdamW(model.parameters(), options.lr, betas=(0.9, 0.95), weight_decay=options.weight_decay)
    batches, losses = Batches(options.data.read_bytes(), options.seq), []
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options)
        loss = model.loss(*batches.training(options.seed, step, rank, options.batch))
        loss.backward()
        norm = libfsdp.clip_grad_norm_(model, options.clip)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
        if rank == 0 and (step % 10 == 0 or step + 1 == options.steps):
            print(f"step {step + 1}: loss {losses[-1]:.6f}, gradient norm {norm.item():.4f}", flush=True)
    if rank == 0 and options.json:
        options.json.write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
