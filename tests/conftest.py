"""What holds for all tests: a loaded machine makes an example of hypothesis slow, never a test fail."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile("syckpt", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("syckpt")

# pytest-xdist tells its workers a terminal's width, though they have none: what is printed to a pipe would be wrapped.
os.environ.pop("COLUMNS", None)
