"""What all tests share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A slow machine is no fault of the code: no test is judged by the clock.
settings.register_profile("muster", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("muster")
