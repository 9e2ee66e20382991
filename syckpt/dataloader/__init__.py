"""Samplers that resume at what was consumed, in O(1), and datasets whose random draws do not depend on the worker that makes them."""

from syckpt.dataloader.sampler import StatefulRandomSampler
from syckpt.dataloader.seeded import is_seeded, seeded

__all__ = ["StatefulRandomSampler", "is_seeded", "seeded"]
