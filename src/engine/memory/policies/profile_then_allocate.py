"""vLLM's order: some graphs are captured once for measure, and room for all is left free."""

from engine.memory.policies.base import Startup


class ProfileThenAllocate:
    """Plans for graphs by an estimate, whose error is recorded."""

    name = "profile_then_allocate"

    def run(self, startup: Startup) -> None:
        startup.load()
        startup.profile_forward()
        graph_bytes = startup.rehearse_capture()
        startup.allocate(startup.available_bytes() - graph_bytes)
        startup.capture()
