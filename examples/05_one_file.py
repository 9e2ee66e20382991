"""A Transformer that keeps its weights in one signed file: saved, checked, loaded by whoever trusts the key, read in part.

python examples/05_one_file.py --dir runs/one-file
"""

import argparse
from pathlib import Path

import torch
from torch import nn

from syckpt import CheckpointMixin, CheckpointReader, validate_checkpoint
from syckpt.repo.signing import keygen


class Transformer(CheckpointMixin, nn.Module):
    """A causal language model; its output layer is its embedding, which the file stores once."""

    def __init__(self, vocab_size: int, dim: int, num_heads: int, num_layers: int, ffn_dim: int, max_seq_len: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.position = nn.Parameter(torch.randn(max_seq_len, dim) / dim**0.5)
        layer = nn.TransformerEncoderLayer(dim, num_heads, ffn_dim, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.embed(tokens) + self.position[:length]
        return self.head(self.layers(hidden, mask=mask, is_causal=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True)
    folder = parser.parse_args().dir
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "key").exists():
        keygen(folder / "key")  # as `syckpt keygen` does; yours belongs elsewhere

    sizes = {"vocab_size": 1000, "dim": 128, "num_heads": 4, "num_layers": 2, "ffn_dim": 512, "max_seq_len": 64}
    torch.manual_seed(0)
    model = Transformer(**sizes)
    tokens = torch.randint(0, 1000, (2, 64))
    model.save_checkpoint(folder / "model.ckpt", signer=folder / "key")

    ok, errors = validate_checkpoint(folder / "model.ckpt")
    print("whole:", ok, errors)

    again = Transformer(**sizes)
    again.load_checkpoint(folder / "model.ckpt", trusted_keys=folder / "key.pub")
    with torch.no_grad():
        print("the same outputs, bit for bit:", torch.equal(again(tokens), model(tokens)))

    with CheckpointReader(folder / "model.ckpt") as reader:
        rows = reader.rows("embed.weight", 500, 510)
        print("ten rows of the embedding:", tuple(rows.shape), "of", len(reader), "tensors")


if __name__ == "__main__":
    main()
