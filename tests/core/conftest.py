from __future__ import annotations

from hypothesis import settings

# A rule is right or wrong; how long an example takes only says how busy the machine is.
settings.register_profile("core", settings.default, deadline=None)
settings.load_profile("core")
