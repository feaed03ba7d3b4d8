from __future__ import annotations

from hypothesis import settings
from quick import part

# A rule is right or wrong; how long an example takes only says how busy the machine is.
settings.register_profile("core", deadline=None, max_examples=part(100))
settings.load_profile("core")
