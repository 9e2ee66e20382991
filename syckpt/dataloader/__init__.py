"""Samplers that resume at what was consumed, in O(1), and datasets whose random draws do not depend on the worker that makes them."""

from syckpt.dataloader.sampler import StatefulDistributedSampler, StatefulRandomSampler, StatefulSampler
from syckpt.dataloader.seeded import is_seeded, seeded

__all__ = ["StatefulDistributedSampler", "StatefulRandomSampler", "StatefulSampler", "is_seeded", "seeded"]
