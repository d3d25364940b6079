"""The ledger of device memory: what each part takes, planned beside measured, reconciled with the driver.

Every part is measured on its own, by the source that knows it: a bare process for the context, the driver before and
after the call that takes memory outside torch's allocator, the allocator's snapshot for what lies inside it. What the
driver reports beyond their sum is stated as unexplained, and is not a part.
"""

from dataclasses import dataclass

# Parts of a process's device memory, in the order in which they come to be; they add up to what its driver reports.
LEDGER_PARTS = {
    "context": "the CUDA context, as a bare process of its own has it",
    "before_start": "held by this process before the engine: libraries and kernels of earlier work",
    "libraries": "streams and library handles, outside torch's allocator",
    "kernels": "code that first runs have loaded, outside torch's allocator",
    "weights": "parameters and the rotary table",
    "static_buffers": "the static batch, and the rows of live requests",
    "workspaces": "library workspaces, inside torch's allocator",
    "kv_cache": "the KV cache, whole blocks",
    "graph_pool": "graphs' scratch memory, inside torch's allocator",
    "graphs_outside_pool": "graphs themselves, outside torch's allocator",
    "activations": "live tensors of a step beyond what stays",
    "allocator_cache": "held by torch's allocator and in no tensor: rounding, and blocks kept for the next step",
}
# LedgerPhase.phase, beside the verbs of start-up: before it, at its end, and the peak of what followed.
START, READY, RUN_PEAK = "start", "ready", "run_peak"
NVML, NONE, EMULATED = "nvml", "none", "emulated"  # MemoryLedger.source


@dataclass(frozen=True)
class LedgerPhase:
    """Device memory at the end of one phase of start-up, or at the peak of the run."""

    phase: str
    parts: dict[str, int]  # part -> bytes of this process, measured on its own
    process_bytes: int | None  # of this process as its driver reports them; None: it does not
    other_bytes: int  # in use on the device by everything else

    @property
    def explained_bytes(self) -> int:
        """Sum of the parts."""
        return sum(self.parts.values())

    @property
    def unexplained_bytes(self) -> int | None:
        """What the driver reports beyond the parts; negative where they exceed it, None where it reports nothing."""
        return None if self.process_bytes is None else self.process_bytes - self.explained_bytes

    @property
    def used_bytes(self) -> int:
        """In use on the device by every process."""
        return (self.explained_bytes if self.process_bytes is None else self.process_bytes) + self.other_bytes


@dataclass(frozen=True)
class MemoryLedger:
    """Device memory by part: what the KV memory policy planned, and what was measured in each phase."""

    total_bytes: int  # of the device
    limit_bytes: int | None  # most of it that may be in use, by whomever; None: the KV cache has a stated size
    source: str  # whose figure process_bytes is: NVML's, nobody's, or that of a CPU which stands in for a device
    planned: dict[str, int]  # part -> bytes, as the policy had them when it sized the KV cache
    phases: tuple[LedgerPhase, ...]

    @property
    def phase_names(self) -> tuple[str, ...]:
        return tuple(phase.phase for phase in self.phases)

    def phase(self, name: str) -> LedgerPhase:
        """The phase of that name; KeyError if there was none."""
        for phase in self.phases:
            if phase.phase == name:
                return phase
        raise KeyError(name)

    @property
    def last(self) -> LedgerPhase:
        """The run's peak, or the end of start-up where nothing has been run."""
        return self.phases[-1]

    @property
    def overrun_bytes(self) -> int | None:
        """How far the device's use exceeds the limit at most, 0 if it never does; None without a limit."""
        return None if self.limit_bytes is None else max(0, max(p.used_bytes for p in self.phases) - self.limit_bytes)

    @property
    def unused_bytes(self) -> int | None:
        """What the limit leaves after start-up once planned activations have their room; None without a limit."""
        if self.limit_bytes is None:
            return None
        ready = self.phase(READY)
        room = sum(max(0, self.planned.get(part, 0) - ready.parts[part]) for part in ("activations", "allocator_cache"))
        return max(0, self.limit_bytes - ready.used_bytes - room)

    @property
    def unexplained_bytes(self) -> int | None:
        """The largest difference, of any phase, between the driver's figure and the parts; None: no figure."""
        differences = [p.unexplained_bytes for p in self.phases if p.unexplained_bytes is not None]
        return max(differences, key=abs) if differences else None
