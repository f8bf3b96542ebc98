"""How many processor cores this process can keep busy: of the machine, and within its control groups.

Knows what Linux says of them (sched_getaffinity(2), sysfs, cgroups). Must not know what they are to compute.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from swactor_core.control_groups import GROUP_ROOT, groups_of, membership, number_in

_CPUS = Path("/sys/devices/system/cpu")


def available_cores() -> int:
    """At least 1: the cores that this process may run on, of hardware threads that share one only the first,
    and no more than its control groups let it use on average."""
    cores = cores_of(os.sched_getaffinity(0), _CPUS)
    quota = quota_of_groups(membership(), GROUP_ROOT)
    return cores if quota is None else max(1, min(cores, int(quota)))


def cores_of(cpus: Collection[int], root: Path) -> int:
    """How many cores the hardware threads `cpus` are of; where the kernel does not say whose they are, as
    many as there are threads up to four, and half of more, which are then mostly two a core."""
    siblings = {_siblings(root / f"cpu{cpu}" / "topology") for cpu in cpus}
    if "" in siblings:
        return len(cpus) if len(cpus) <= 4 else len(cpus) // 2
    return max(1, len(siblings))


def _siblings(topology: Path) -> str:
    """The hardware threads of one core; the older name is the only one before Linux 5.2."""
    for name in ("core_cpus_list", "thread_siblings_list"):
        try:
            return (topology / name).read_text().strip()
        except OSError:
            pass
    return ""


def quota_of_groups(groups: str, root: Path) -> float | None:
    """The least bandwidth of the control groups in `groups`, the content of /proc/self/cgroup, and of their
    ancestors below `root`, in cores; None when nothing limits them."""
    second, first = groups_of("cpu", groups, root)
    quotas = [_share(group / "cpu.max") for group in second]
    for group in first:
        most, period = number_in(group / "cpu.cfs_quota_us"), number_in(group / "cpu.cfs_period_us")
        if most is not None and most > 0 and period:  # -1 is none
            quotas.append(most / period)
    return min((quota for quota in quotas if quota is not None), default=None)


def _share(file: Path) -> float | None:
    """Of cpu.max: `max` or microseconds, and the period that they are of."""
    try:
        most, period = file.read_text().split()
        return None if most == "max" else int(most) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
