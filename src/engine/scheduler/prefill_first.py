"""New requests before running ones: a step prefills whoever can be admitted, and decodes only when nobody can.

nano-vllm's policy. First tokens come early and decode batches grow full fast; running requests stall for the length of
each prefill. A step is either all prefill or all decode.
"""

from engine.scheduler.base import Scheduler
from engine.scheduler.plan import StepPlan


class PrefillFirst(Scheduler):
    """Admit in order of arrival while room lasts; otherwise decode all running requests."""

    def schedule(self) -> StepPlan:
        # A request preempted by this decode waits for the next step's admission: readmitting it now would take the
        # blocks that it was preempted for.
        return self.prefill_waiting() or self.decode_running()
