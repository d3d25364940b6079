"""The KV memory policies, by name: one file each, which orders the verbs of start-up."""

from engine.memory.policies.allocate_first import AllocateFirst
from engine.memory.policies.base import KVMemoryPolicy
from engine.memory.policies.capture_then_allocate import CaptureThenAllocate
from engine.memory.policies.fixed import Fixed
from engine.memory.policies.profile_then_allocate import ProfileThenAllocate

KV_MEMORY_POLICIES: dict[str, KVMemoryPolicy] = {
    policy.name: policy for policy in (AllocateFirst(), ProfileThenAllocate(), CaptureThenAllocate(), Fixed())
}
