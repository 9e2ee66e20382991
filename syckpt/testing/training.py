"""A real training run for tests and benchmarks: a GPT over bytes, on the sources of Python's own standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["ByteGPT", "Training"]


class _Block(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ByteGPT(nn.Module):  # type: ignore[misc]
    """A decoder over 256 byte values; the head is the embedding's transpose. 10.8 million parameters by default."""

    def __init__(self, *, width: int = 384, layers: int = 6, heads: int = 6, context: int = 64) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks, self.norm = nn.Sequential(*(_Block(width, heads) for _ in range(layers))), nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return next-byte logits, shape (batch, length, 256)."""
        h = self.norm(self.blocks(self.token(tokens) + self.position.weight[: tokens.shape[1]]))
        return h @ self.token.weight.T


class Training:
    """`step()` makes one AdamW step (betas 0.9, 0.95; gradients clipped to norm 1) on a batch of 4 sequences."""

    def __init__(self, *, lr: float = 3e-4, seed: int = 0, context: int = 64, **shape: Any) -> None:
        torch.manual_seed(seed)
        self.model = ByteGPT(context=context, **shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.95))
        self._context = context
        self._generator = torch.Generator().manual_seed(seed)
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        self._text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)

    def step(self, count: int = 1) -> float:
        """Make steps and return the last one's loss."""
        loss = torch.tensor(float("nan"))
        for _ in range(count):
            starts = torch.randint(len(self._text) - self._context - 1, (4,), generator=self._generator)
            batch = torch.stack([self._text[start : start + self._context + 1] for start in starts.tolist()]).long()
            loss = F.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        return float(loss.item())
