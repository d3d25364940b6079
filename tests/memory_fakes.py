"""A device made up of numbers, which stands in for a GPU where only sums matter."""

from contextlib import nullcontext

from engine.memory.gauge import Reading


class FakeGauge:
    """`total_bytes` of device; whoever takes memory adds to `allocated`, `cached`, `pools`, `outside` or `others`."""

    def __init__(self, total_bytes=10_000, context=300, others=0, source="nvml"):
        self.total_bytes, self.source = total_bytes, source
        self.context, self.others = context, others
        self.allocated = self.cached = self.pools = 0
        self.outside = context
        self.peak = (0, 0)
        self.capped_at = "never"

    @property
    def process(self):
        return self.reserved_bytes() + self.outside

    def context_bytes(self):
        return self.context

    def read(self):
        return Reading(self.used_bytes(), None if self.source == "none" else self.process, self.reserved_bytes(),
                       self.pools, self.allocated)

    def used_bytes(self):
        return self.process + self.others

    def reserved_bytes(self):
        return self.allocated + self.cached + self.pools

    def outside_bytes(self):
        return self.outside

    def peaks(self):
        return self.peak

    def reset_peak(self):
        self.peak = (self.allocated + self.pools, self.reserved_bytes())

    def trim(self):
        self.cached = 0

    def cap(self, num_bytes):
        self.capped_at = num_bytes

    def watch(self):
        return nullcontext()

    def snapshot(self):
        return {}
