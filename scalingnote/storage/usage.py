"""Resource use of a stage: requests to storage, bytes read and written, rows encoded, and peak memory.

Each process counts separately. A process of Ray counts in a small memory-mapped file in the folder of Ray's
session on its node. So the counts of a killed process are not lost, and any process can add up the counts of
its job. A file that is mapped into memory counts as read in full when it is opened.
"""

import mmap
import resource
import struct
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

from scalingnote.core.log import get_logger

# process -> requests, bytes read, bytes written, peak bytes, rows encoded
ProcessCounts = dict[str, tuple[int, int, int, int, int]]
LAYOUT = struct.Struct("<5q")
STATUS = Path("/proc/self/status")
NODE_TIMEOUT_S = 30.0  # for a node to report its counts
_PROCESS = uuid.uuid4().hex  # operating systems reuse process ids
_lock = threading.Lock()
_counts: "bytearray | mmap.mmap" = bytearray(LAYOUT.size)
log = get_logger("usage")


def count(*, requests: int = 1, read: int = 0, written: int = 0, rows: int = 0) -> None:
    """Add to the counts of this process."""
    global _counts
    with _lock:
        if not isinstance(_counts, mmap.mmap) and (folder := _folder()):
            _counts = _map(folder / _PROCESS, bytes(_counts))
        before = LAYOUT.unpack_from(_counts)
        sums = before[0] + requests, before[1] + read, before[2] + written
        LAYOUT.pack_into(_counts, 0, *sums, peak_bytes(), before[4] + rows)


def count_rows(rows: int) -> None:
    """Add rows that this process has encoded, also those of unfinished parts, for progress lines."""
    count(requests=0, rows=rows)


def rows_on_this_node() -> int:
    """Return the number of rows that processes of this job have encoded on this node so far."""
    return sum(counts[4] for counts in _on_this_node().values())


def snapshot() -> ProcessCounts:
    """Collect the counts of all processes of this job, on all nodes."""
    process_counts = _on_this_node()
    for counts in _on_other_nodes():
        process_counts |= counts
    count(requests=0)  # its peak
    return process_counts | {_PROCESS: LAYOUT.unpack_from(_counts)}


def since(start: ProcessCounts) -> dict[str, int]:
    """Return the counts since a snapshot; peaks are over the lives of the processes active since then."""
    now = snapshot()
    active = {name: counts for name, counts in now.items() if counts[:3] != start.get(name, (0,) * 5)[:3]}
    requests, bytes_read, bytes_written = (
        sum(counts[i] - start.get(name, (0,) * 5)[i] for name, counts in active.items()) for i in range(3)
    )
    return {
        "requests": requests,
        "bytes_read": bytes_read,
        "bytes_written": bytes_written,
        "driver_peak_bytes": now[_PROCESS][3],
        "worker_peak_bytes": max((c[3] for name, c in active.items() if name != _PROCESS), default=0),
    }


def summary(usage: dict[str, int], seconds: float, rows: int | None) -> str:
    """Format speeds, requests and peaks as one line."""
    seconds = max(seconds, 1e-3)
    parts = [f"{rows / seconds:,.0f} rows/s"] if rows else []
    parts += [
        f"{usage['bytes_read'] / seconds / 1e6:,.1f} MB/s read",
        f"{usage['bytes_written'] / seconds / 1e6:,.1f} MB/s written",
        f"{usage['requests']:,} requests",
        f"peak {usage['driver_peak_bytes'] / 1e9:.2f} GB driver",
    ]
    worker = usage["worker_peak_bytes"]
    return ", ".join([*parts, f"{worker / 1e9:.2f} GB worker"] if worker else parts)


def peak_bytes() -> int:
    """Return the largest resident size of this process so far."""
    try:
        status = STATUS.read_bytes()
    except FileNotFoundError:  # not Linux
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak << 10
    # Not getrusage: on Linux its value survives an exec, so a small child would have its parent's peak.
    return int(status.split(b"VmHWM:")[1].split()[0]) << 10


def _map(path: Path, start: bytes) -> mmap.mmap:
    """Create and map the file of a process of Ray, with its counts so far."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(start)
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), LAYOUT.size)


def _ray() -> Any:
    """Return Ray if this process is connected to a cluster; storage does not import it."""
    ray = sys.modules.get("ray")
    return ray if ray is not None and getattr(ray, "is_initialized", lambda: False)() else None


def _folder() -> Path | None:
    """Return the folder of the counts of this job on this node."""
    if (ray := _ray()) is None:
        return None
    context = ray.get_runtime_context()
    folders = (context.get_temp_dir(), context.get_session_name(), "scalingnote-usage", context.get_job_id())
    return Path(*folders)


def _on_this_node() -> ProcessCounts:
    folder = _folder()
    files = folder.iterdir() if folder and folder.is_dir() else ()
    contents = {file.name: file.read_bytes() for file in files}
    return {name: LAYOUT.unpack(data) for name, data in contents.items() if len(data) == LAYOUT.size}


def _on_other_nodes() -> list[ProcessCounts]:
    """Collect the counts of the other nodes by a task on each; a node that is lost has none."""
    if (ray := _ray()) is None:
        return []
    own_node = ray.get_runtime_context().get_node_id()
    others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != own_node]
    if not others:
        return []
    on_node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    task = ray.remote(num_cpus=0, max_retries=0)(_on_this_node)
    tasks = [task.options(scheduling_strategy=on_node(node_id=node, soft=True)).remote() for node in others]
    finished, _ = ray.wait(tasks, num_returns=len(tasks), timeout=NODE_TIMEOUT_S)
    node_counts = []
    for each in finished:
        try:
            node_counts.append(ray.get(each))
        except ray.exceptions.RayError as error:
            log.debug("a node did not report its counts: %s", error)
    return node_counts
