"""The control groups that this process is in, as folders (cgroups(7), version 2 and 1).

Knows where they lie and how their files say a number. Must not know what any controller bounds.
"""

from __future__ import annotations

from pathlib import Path

GROUP_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def membership() -> str:
    """What proc_pid_cgroup(5) says of this process; empty where nobody says."""
    try:
        return _MEMBERSHIP.read_text()
    except OSError:
        return ""


def groups_of(controller: str, groups: str, root: Path) -> tuple[list[Path], list[Path]]:
    """Those of version 2, and those of version 1 that the controller bounds, each with its ancestors, whose
    trees are mounted below `root`; `groups` is what `membership` says.

    A line is hierarchy:controllers:path. Version 2 lies at `root`, or at `root/unified` beside version 1,
    where each controller has a tree of its own. Where a container sees its host's path, only the tree's root,
    which is then the container's own group, is found."""
    second: list[Path] = []
    first: list[Path] = []
    for line in groups.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            second += [group for tree in (root, root / "unified") for group in _upwards(tree, path)]
        elif controller in controllers.split(","):
            first += _upwards(root / controller, path)
    return second, first


def number_in(file: Path) -> int | None:
    """None where there is no file, and for `max`, which is no limit."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _upwards(tree: Path, path: str) -> list[Path]:
    """The group and all above it, up to the tree's root."""
    group = tree / path.lstrip("/")
    return [group, *(above for above in group.parents if above.is_relative_to(tree))]
