"""KV memory policies against a fake device: the order of the verbs, and the arithmetic between them."""

from dataclasses import dataclass, field

import pytest

from engine.memory.policies import KV_MEMORY_POLICIES


@dataclass
class FakeStartup:
    """Says what was called; a device with 1000 bytes left, on which graphs take 70."""

    calls: list[str] = field(default_factory=list)

    def load(self):
        self.calls.append("load")

    def profile_forward(self):
        self.calls.append("profile_forward")
        return 30

    def rehearse_capture(self):
        self.calls.append("rehearse_capture")
        return 70

    def available_bytes(self):
        return 1000

    def stated_bytes(self):
        return 640

    def allocate(self, num_bytes):
        self.calls.append(f"allocate {num_bytes}")

    def capture(self):
        self.calls.append("capture")


ORDERS = {
    "allocate_first": ["load", "profile_forward", "allocate 1000", "capture"],
    "profile_then_allocate": ["load", "profile_forward", "rehearse_capture", "allocate 930", "capture"],
    "fixed": ["load", "allocate 640", "capture"],
}


@pytest.mark.parametrize("name", ORDERS)
def test_a_policy_orders_the_verbs_as_its_name_says(name):
    startup = FakeStartup()
    KV_MEMORY_POLICIES[name].run(startup)
    assert startup.calls == ORDERS[name]


@pytest.mark.parametrize("name", KV_MEMORY_POLICIES)
def test_every_policy_loads_before_it_allocates_and_allocates_before_it_captures(name):
    startup = FakeStartup()
    KV_MEMORY_POLICIES[name].run(startup)
    verbs = [call.split()[0] for call in startup.calls]
    assert verbs[0] == "load" and verbs.count("allocate") == 1
    assert verbs.index("allocate") < verbs.index("capture")
