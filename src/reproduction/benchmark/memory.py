"""Peak memory of a piece of work."""

import json
import os
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from reproduction.benchmark.timing import Work

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler complains where there is no GPU


def peak_bytes(work: Work, device: torch.device) -> int:
    """The most that torch's tensors hold during `work`, beyond what they held when it began.

    On a GPU by the allocator's own count, on a CPU by the profiler's record of every allocation;
    what other libraries allocate on the host is not seen.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        work()
    held = peak = 0
    for change in _changes(record):
        held += change
        peak = max(peak, held)
    return peak


def _changes(record: profile) -> list[int]:
    """Bytes taken and given back, in order."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        record.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    memory = [event for event in events if event["name"] == "[memory]"]
    return [event["args"]["Bytes"] for event in sorted(memory, key=lambda event: event["ts"])]
