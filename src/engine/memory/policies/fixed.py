"""The stated size, whatever else the device holds."""

from engine.memory.policies.base import Startup


class Fixed:
    """Measures nothing."""

    name = "fixed"

    def run(self, startup: Startup) -> None:
        startup.load()
        startup.allocate(startup.stated_bytes())
        startup.capture()
