"""nano-vllm's order: the cache takes all that is left, and graphs land in the slack beyond the limit."""

from engine.memory.policies.base import Startup


class AllocateFirst:
    """Plans nothing for graphs."""

    name = "allocate_first"

    def run(self, startup: Startup) -> None:
        startup.load()
        startup.profile_forward()
        startup.allocate(startup.available_bytes())
        startup.capture()
