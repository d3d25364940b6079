"""The exact order: graphs are captured against addresses that have no memory yet, which then gets all that is left.

A graph holds addresses, and the addresses of the cache do not depend on its size. So what the graphs take is known, and
not estimated, when the cache is sized.
"""

from engine.memory.policies.base import Startup


class CaptureThenAllocate:
    """Plans for nothing that is not in use already, but for the activations of a step."""

    name = "capture_then_allocate"

    def run(self, startup: Startup) -> None:
        startup.load()
        startup.profile_forward()
        startup.reserve()
        startup.capture()
        startup.allocate(startup.available_bytes())
