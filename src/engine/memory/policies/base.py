"""A KV memory policy decides one thing: the order of the start-up verbs.

The order is the experiment: sizing the cache before the graphs exist guesses what they will take. Policies hold no
tensors, so a fake device can test them; `engine.startup` has the real verbs.
"""

from typing import Protocol


class Startup(Protocol):
    """The verbs that a policy orders. All sizes are bytes on the device."""

    def load(self) -> None:
        """Put the weights on the device; ValueError with the sum where these alone leave too little for the cache."""

    def profile_forward(self) -> int:
        """Run the largest prefill and the largest sampling batch; returns their peak above what stays allocated."""

    def rehearse_capture(self) -> int:
        """Capture some graphs against a stand-in cache and drop them; returns what all of them are expected to take."""

    def reserve(self) -> None:
        """Reserve addresses for the largest cache of use, with memory for no more than a stand-in behind them."""

    def available_bytes(self) -> int:
        """What the limit leaves now: limit - in use - the profiled peak. Negative when it is overdrawn."""

    def stated_bytes(self) -> int:
        """The size that kv.bytes, kv.tokens or kv.num_blocks states."""

    def allocate(self, num_bytes: int) -> None:
        """Take as many whole KV blocks as `num_bytes` holds, behind reserved addresses where there are any; ValueError
        with the sum when these are too few."""

    def capture(self) -> None:
        """Capture a graph for every bucket."""


class KVMemoryPolicy(Protocol):
    """One order of the verbs."""

    name: str

    def run(self, startup: Startup) -> None: ...
