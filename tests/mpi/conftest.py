"""Jobs of fake agents, as the torch front's tests have them."""

from tests.train.conftest import make_job

__all__ = ["make_job"]
