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
    return _of_machine("MemAvailable:")


def _of_machine(name: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def swap_rest() -> int:
    """Bytes that the machine can page out before it has to end a process; what a control group may page out
    is not looked at."""
    return _of_machine("SwapFree:") or 0


def rest_in_words() -> str:
    """Whose the limit of `available_memory` is: this machine's, or its control group's."""
    group, machine = group_rest(), machine_rest()
    narrower = group is not None and (machine is None or group < machine)
    return "in this control group" if narrower else "on this machine"


def group_rest() -> int | None:
    """Bytes that this process's control groups leave to it; None without a limit."""
    try:
        membership = Path("/proc/self/cgroup").read_text()
    except OSError:
        return None
    return rest_of_groups(membership, _GROUP_ROOT)


def rest_of_groups(membership: str, root: Path) -> int | None:
    """The least rest of the control groups in `membership`, the content of /proc/self/cgroup, and of their
    ancestors, whose trees are mounted below `root`; None when nothing limits them.

    A line is hierarchy:controllers:path (cgroups(7)). Version 2 lies at `root`, or at `root/unified` beside
    version 1, whose memory controller has a tree of its own. Where a container sees its host's path, only the
    tree's root, which is then the container's own group, is found."""
    rests: list[int | None] = []
    for line in membership.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            rests += [_rest(group) for tree in (root, root / "unified") for group in _upwards(tree, path)]
        elif "memory" in controllers.split(","):
            rests += [_rest_of_version_1(group) for group in _upwards(root / "memory", path)]
    return min((rest for rest in rests if rest is not None), default=None)


def _upwards(tree: Path, path: str) -> list[Path]:
    """The group and all above it, up to the tree's root."""
    group = tree / path.lstrip("/")
    return [group, *(above for above in group.parents if above.is_relative_to(tree))]


def _rest(group: Path) -> int | None:
    """Above `memory.high` processes are held up until they nearly stand still, beyond `memory.max` ended."""
    limits = [_number(group / name) for name in ("memory.max", "memory.high")]
    most = min((limit for limit in limits if limit is not None), default=None)
    return _left(
        group, most, used=_number(group / "memory.current"), droppable=("inactive_file", "active_file")
    )


def _rest_of_version_1(group: Path) -> int | None:
    return _left(
        group,
        _number(group / "memory.limit_in_bytes"),
        used=_number(group / "memory.usage_in_bytes"),
        droppable=("total_inactive_file", "total_active_file"),
    )


def _left(group: Path, most: int | None, *, used: int | None, droppable: tuple[str, ...]) -> int | None:
    """Pages of files are dropped by the kernel before it refuses memory."""
    if most is None or used is None:
        return None
    try:
        facts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, most - used + sum(int(facts.get(name, 0)) for name in droppable))
    except (OSError, ValueError):
        return max(0, most - used)


def _number(file: Path) -> int | None:
    """None also for `max`, which is no limit."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
