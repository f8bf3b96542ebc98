"""What memory this process can still have: of the machine, and within the control groups that it is in.

Knows what Linux says of it (proc(5), cgroup v2 and v1). Must not know what the memory is for.
"""

from __future__ import annotations

from pathlib import Path

_GROUP_ROOT = Path("/sys/fs/cgroup")


def available_memory() -> int | None:
    """Bytes that can be had without paging: what the machine or the control groups have left, whichever is
    less; None where nobody says."""
    return min((rest for rest in (machine_rest(), group_rest()) if rest is not None), default=None)


def machine_rest() -> int | None:
    """The kernel's own estimate of what can be had without paging, in bytes."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def group_rest() -> int | None:
    """Bytes that this process's control groups leave to it; None without a limit."""
    try:
        membership = Path("/proc/self/cgroup").read_text()
    except OSError:
        return None
    return rest_of_groups(membership, _GROUP_ROOT)


def rest_of_groups(membership: str, root: Path) -> int | None:
    """The least rest of the control groups in `membership`, the content of /proc/self/cgroup, and of their
    ancestors, whose tree is mounted at `root`; None when nothing limits them. Of version 1 only the tree's
    own limit is looked at, which in a container is the container's."""
    rests = [_rest(root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes")]
    for line in membership.splitlines():
        if not line.startswith("0::"):
            continue
        group = root / line.removeprefix("0::").lstrip("/")
        while group.is_relative_to(root):
            rests.append(_rest(group, "memory.max", "memory.current"))
            group = group.parent
    return min((rest for rest in rests if rest is not None), default=None)


def _rest(group: Path, limit: str, used: str) -> int | None:
    try:
        most, taken = (group / limit).read_text().strip(), int((group / used).read_text())
        facts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        droppable = int(facts.get("inactive_file", 0))  # dropped by the kernel before it refuses memory
        return None if most == "max" else max(0, int(most) - taken + droppable)
    except (OSError, ValueError):
        return None
