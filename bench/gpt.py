"""The model that is measured, in Python: the parameters and operators of bench/gpt.cpp."""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 8192
HEAD_WIDTH = 64


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = self.qkv(self.attention_norm(x)).unflatten(-1, (3, -1, HEAD_WIDTH)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, sequence: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """tokens [batch, sequence + 1] -> the mean cross-entropy of each token given those before it"""
        x = self.tokens(ids[:, :-1]) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), ids[:, 1:].flatten())


def save_weights(model: nn.Module, file: str) -> None:
    with open(file, "wb") as out:
        for parameter in model.parameters():
            out.write(parameter.detach().numpy().tobytes())


def load_weights(model: nn.Module, file: str) -> None:
    numel = sum(parameter.numel() for parameter in model.parameters())
    saved = torch.from_file(file, shared=False, size=numel, dtype=torch.float32)
    with torch.no_grad():
        for parameter, part in zip(model.parameters(), saved.split([p.numel() for p in model.parameters()])):
            parameter.copy_(part.view_as(parameter))
