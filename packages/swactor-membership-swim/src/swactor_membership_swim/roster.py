"""The table of others: one entry a name, found by name or by life, bounded, with tombstones that end.

Knows which entries exist. What a claim changes in an entry is the machine's to say.
"""

from __future__ import annotations

from collections.abc import Iterator

from swactor_core.ids import NodeId
from swactor_core.spi.membership import Member, MemberState

from swactor_membership_swim.members import Entry, Life, life_of


class Roster:
    """`limit` bounds the entries, tombstones included; `tombstone` is how long these are kept, in seconds."""

    def __init__(self, *, limit: int, tombstone: float) -> None:
        self._limit = limit
        self._tombstone = tombstone
        self._entries: dict[str, Entry] = {}
        self._names: dict[Life, str] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def get(self, name: str) -> Entry | None:
        return self._entries.get(name)

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def of_life(self, life: Life) -> Entry | None:
        name = self._names.get(life)
        return None if name is None else self._entries[name]

    def of_node(self, node_id: NodeId) -> Entry | None:
        """The latest life of that node."""
        found = [entry for entry in self._entries.values() if entry.member.node_id == node_id]
        return max(found, key=lambda entry: entry.member.epoch, default=None)

    def present(self) -> list[Entry]:
        """Entries that are Alive or Suspect."""
        return [entry for entry in self._entries.values() if entry.present]

    def dead(self) -> list[Entry]:
        return [entry for entry in self._entries.values() if entry.member.state is MemberState.DEAD]

    def put(self, member: Member, now: float, *, hearsay: bool = False) -> Entry | None:
        """A new entry in place of any former life of the name; None when the table is full of the living."""
        if member.name in self._entries:
            self.forget(member.name)
        elif len(self._entries) + 1 >= self._limit and not self._make_room():
            return None
        entry = Entry(member, now, hearsay=hearsay)
        self._entries[member.name] = entry
        self._names[life_of(member)] = member.name
        return entry

    def _make_room(self) -> bool:
        tombs = [(entry.changed, name) for name, entry in self._entries.items() if not entry.present]
        if not tombs:
            return False
        self.forget(min(tombs)[1])
        return True

    def forget(self, name: str) -> None:
        life = life_of(self._entries.pop(name).member)
        if self._names.get(life) == name:
            del self._names[life]

    def reap(self, now: float) -> None:
        """Forgets the tombstones that have lasted long enough."""
        for name, entry in list(self._entries.items()):
            if not entry.present and now - entry.changed >= self._tombstone:
                self.forget(name)
