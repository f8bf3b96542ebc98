"""What memory this process can still have: of the machine, and within the control groups that it is in.

Knows what Linux says of it (proc(5), cgroup v2 and v1). Must not know what the memory is for.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

from swactor_core.control_groups import GROUP_ROOT, groups_of, membership, number_in

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MEMINFO = Path("/proc/meminfo")
_MOUNTS = Path("/proc/self/mountinfo")
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_NO_LIMIT = 1 << 60
"""Version 1 has a number of this size where nothing is bounded."""
_ZFS = Path("/proc/spl/kstat/zfs/arcstats")


def available_memory() -> int | None:
    """Bytes that can be had without paging: what the machine or the control groups have left, whichever is
    less; None where nobody says."""
    return min((rest for rest in (machine_rest(), group_rest()) if rest is not None), default=None)


def machine_rest() -> int | None:
    """What can be had without paging, in bytes: the kernel's own estimate, and what ZFS keeps of files, which
    it gives back as the page cache does and the estimate does not know of."""
    rest = _said_by_kernel("MemAvailable")
    return None if rest is None else rest + _given_back_by_zfs()


def within_limits(free: int | None) -> int | None:
    """Of `free` bytes those that may be taken as memory of a process's own: pages of a mapped file stay
    outside of what the kernel promises where it promises no more than it has (proc_sys_vm(5),
    overcommit_memory 2), and of RLIMIT_DATA (getrlimit(2))."""
    if free is None:
        return None
    limits = [resource.getrlimit(which)[0] for which in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    rests = [limit for limit in limits if limit != resource.RLIM_INFINITY]
    most, promised = _said_by_kernel("CommitLimit"), _said_by_kernel("Committed_AS")
    if number_in(_OVERCOMMIT) == 2 and most is not None and promised is not None:
        rests.append(max(0, most - promised))
    return min([free, *rests])


def machine() -> str:
    """Whose memory it is, the same for all containers of one machine: the kernel's id of this boot
    (random(4)), empty where it says none."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


def available_swap() -> int:
    """Bytes that may be paged out beyond `available_memory`: more than that is slow, and not ended."""
    swap = _said_by_kernel("SwapFree") or 0
    return swap and min([swap, *swap_of_groups(membership(), GROUP_ROOT)])


def _said_by_kernel(name: str) -> int | None:
    """A line of proc_meminfo(5), in bytes."""
    try:
        lines = _MEMINFO.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _given_back_by_zfs() -> int:
    """The adaptive cache beyond its lower bound (`size` and `c_min` of arcstats, both in bytes)."""
    try:
        rows = [line.split() for line in _ZFS.read_text().splitlines()]
        facts = {row[0]: int(row[2]) for row in rows if len(row) == 3 and row[0] in ("size", "c_min")}
    except (OSError, ValueError):
        return 0
    return max(0, facts.get("size", 0) - facts.get("c_min", 0))


def lies_in_memory(path: str) -> bool:
    """Whether the file is in a file system that is memory itself, and is counted as used there."""
    try:
        return file_system(os.stat(path).st_dev, _MOUNTS.read_text()) in ("tmpfs", "ramfs")
    except (OSError, ValueError):
        return False


def file_system(device: int, mounts: str) -> str:
    """The type of the file system on `device` by proc_pid_mountinfo(5), empty where it has none."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.splitlines():
        mount, _, kind = line.partition(" - ")
        if mount.split()[2:3] == [wanted]:
            return kind.split(" ")[0]
    return ""


def rest_in_words() -> str:
    """Whose the limit of `available_memory` is: this machine's, or its control group's."""
    group, machine = group_rest(), machine_rest()
    narrower = group is not None and (machine is None or group < machine)
    return "in this control group" if narrower else "on this machine"


def group_rest() -> int | None:
    """Bytes that this process's control groups leave to it; None without a limit."""
    return rest_of_groups(membership(), GROUP_ROOT)


def rest_of_groups(groups: str, root: Path) -> int | None:
    """The least rest of the control groups in `groups`, the content of /proc/self/cgroup, and of their
    ancestors below `root`; None when nothing limits them."""
    second, first = groups_of("memory", groups, root)
    rests = [*map(_rest, second), *map(_rest_of_version_1, first)]
    return min((rest for rest in rests if rest is not None), default=None)


def swap_of_groups(groups: str, root: Path) -> list[int]:
    """What each of the groups that bound it leaves of swap; as `rest_of_groups`."""
    second, first = groups_of("memory", groups, root)
    names = ("memory.swap.max", "memory.swap.current")
    pairs = [(number_in(group / names[0]), number_in(group / names[1])) for group in second]
    for group in first:
        # Version 1 bounds memory and swap together: swap is what lies beyond the bound of memory.
        both, memory, used, swapped = (
            number_in(group / f"memory.{name}_in_bytes")
            for name in ("memsw.limit", "limit", "usage", "memsw.usage")
        )
        if both is not None and memory is not None and memory < _NO_LIMIT:
            pairs.append((both, memory + max(0, (swapped or 0) - (used or 0))))
    return [max(0, most - less) for most, less in pairs if most is not None and less is not None]


def _rest(group: Path) -> int | None:
    """Above `memory.high` processes are held up until they nearly stand still, beyond `memory.max` ended."""
    limits = [number_in(group / name) for name in ("memory.max", "memory.high")]
    most = min((limit for limit in limits if limit is not None), default=None)
    return _left(
        group, most, used=number_in(group / "memory.current"), droppable=("inactive_file", "active_file")
    )


def _rest_of_version_1(group: Path) -> int | None:
    return _left(
        group,
        number_in(group / "memory.limit_in_bytes"),
        used=number_in(group / "memory.usage_in_bytes"),
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
