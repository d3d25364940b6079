"""KV memory policies against a fake device: the order of the verbs, the arithmetic between them, and what fails."""

from dataclasses import dataclass, field

import pytest

from engine.memory.policies import KV_MEMORY_POLICIES

LIMIT, WEIGHTS, ACTIVATIONS, STAND_IN, GRAPHS, REHEARSED = 1000, 300, 30, 10, 70, 60


@dataclass
class FakeStartup:
    """A device with a limit of 1000 bytes, on which graphs take 70 and are rehearsed to take 60."""

    fails_in: str | None = None
    calls: list[str] = field(default_factory=list)
    used: int = 0
    activations: int = 0
    kv_bytes: int = 0
    has_addresses: bool = False

    def _call(self, verb: str, text: str = "") -> None:
        self.calls.append(f"{verb} {text}".strip())
        if self.fails_in == verb:
            raise ValueError(f"out of device memory during {verb}")

    def load(self):
        self._call("load")
        self.used += WEIGHTS

    def profile_forward(self):
        self._call("profile_forward")
        self.activations = ACTIVATIONS
        return ACTIVATIONS

    def rehearse_capture(self):
        self._call("rehearse_capture")
        return REHEARSED

    def reserve(self):
        self._call("reserve")
        self.has_addresses = True
        self.used += STAND_IN
        self.kv_bytes = STAND_IN

    def available_bytes(self):
        return LIMIT - self.used - self.activations

    def stated_bytes(self):
        return 640

    def allocate(self, num_bytes):
        self._call("allocate", str(num_bytes))
        self.kv_bytes += num_bytes
        self.used += num_bytes

    def capture(self):
        self._call("capture")
        assert self.has_addresses or self.kv_bytes, "a graph needs the addresses of the cache"
        self.used += GRAPHS


ORDERS = {
    "allocate_first": ["load", "profile_forward", "allocate 670", "capture"],
    "profile_then_allocate": ["load", "profile_forward", "rehearse_capture", "allocate 610", "capture"],
    "capture_then_allocate": ["load", "profile_forward", "reserve", "capture", "allocate 590"],
    "fixed": ["load", "allocate 640", "capture"],
}
# What the limit is exceeded by once all is in place and a step runs: the graphs, the error of their estimate, nothing.
OVERRUNS = {"allocate_first": GRAPHS, "profile_then_allocate": GRAPHS - REHEARSED, "capture_then_allocate": 0}


def run(name, **changes):
    startup = FakeStartup(**changes)
    KV_MEMORY_POLICIES[name].run(startup)
    return startup


def test_every_policy_is_told_here():
    assert ORDERS.keys() == KV_MEMORY_POLICIES.keys()


@pytest.mark.parametrize("name", ORDERS)
def test_a_policy_orders_the_verbs_as_its_name_says(name):
    assert run(name).calls == ORDERS[name]


@pytest.mark.parametrize("name", OVERRUNS)
def test_the_overrun_is_what_the_policy_did_not_know_when_it_sized_the_cache(name):
    startup = run(name)
    assert startup.used + startup.activations - LIMIT == OVERRUNS[name]


@pytest.mark.parametrize("name", KV_MEMORY_POLICIES)
def test_every_policy_loads_first_and_a_graph_never_comes_before_its_addresses(name):
    verbs = [call.split()[0] for call in run(name).calls]
    assert verbs[0] == "load" and verbs.count("allocate") == verbs.count("capture") == 1
    addresses = "reserve" if "reserve" in verbs else "allocate"
    assert verbs.index(addresses) < verbs.index("capture")


@pytest.mark.parametrize(("name", "verb"), [
    (name, call.split()[0]) for name, calls in ORDERS.items() for call in calls])
def test_a_verb_that_fails_is_the_last_one_called(name, verb):
    startup = FakeStartup(fails_in=verb)
    with pytest.raises(ValueError, match=f"during {verb}"):
        KV_MEMORY_POLICIES[name].run(startup)
    assert startup.calls[-1].split()[0] == verb
