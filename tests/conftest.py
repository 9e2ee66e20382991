"""What holds for all tests: a loaded machine makes an example of hypothesis slow, never a test fail."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("syckpt", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("syckpt")
