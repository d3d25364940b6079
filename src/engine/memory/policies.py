"""The KV memory policies, by name. Each is the order it names, and nothing else."""

from engine.memory.policy import KVMemoryPolicy, Startup


class AllocateFirst:
    """nano-vllm's order: the cache takes all that is left, and graphs land in the slack beyond the limit."""

    name = "allocate_first"

    def run(self, startup: Startup) -> None:
        startup.load()
        startup.profile_forward()
        startup.allocate(startup.available_bytes())
        startup.capture()


class ProfileThenAllocate:
    """vLLM's order: some graphs are captured once for measure, and room for all is left free."""

    name = "profile_then_allocate"

    def run(self, startup: Startup) -> None:
        startup.load()
        startup.profile_forward()
        graph_bytes = startup.rehearse_capture()
        startup.allocate(startup.available_bytes() - graph_bytes)
        startup.capture()


class Fixed:
    """The stated size, whatever else the device holds."""

    name = "fixed"

    def run(self, startup: Startup) -> None:
        startup.load()
        startup.allocate(startup.stated_bytes())
        startup.capture()


KV_MEMORY_POLICIES: dict[str, KVMemoryPolicy] = {
    policy.name: policy for policy in (AllocateFirst(), ProfileThenAllocate(), Fixed())
}
