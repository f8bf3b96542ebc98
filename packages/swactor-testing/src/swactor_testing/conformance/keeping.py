"""What a provider of any kind keeps on the disk: it lists what is there, and deletes what it is told to.

The guarantees are those of `swactor_core.spi.storage`. What is kept, and what it is to be in use, is the
heir's to say.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from swactor_core.errors import ResourceError
from swactor_core.plugins import load_plugins
from swactor_core.spi.provider import Provider
from swactor_core.spi.storage import Storage, Stored, StoredKind
from swactor_core.values import frozen

from swactor_testing.conformance.capabilities import StorageCapabilities


@frozen
class Kept:
    """A private place for a test: all that the provider keeps is below `folder`, and nothing is there yet.

    `make()` leaves one more thing there, of 100 bytes or more, that nobody uses, as the plug-in itself would,
    and gives its path; `use(path)` has it in use as the plug-in itself would, until its end."""

    folder: Path
    make: Callable[[], Path]
    use: Callable[[Path], AbstractContextManager[object]]


def everything(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Each path below `folder`: mode, size and time of the last change, of folders the mode alone."""
    found = {}
    for path in folder.rglob("*"):
        state = path.lstat()
        found[str(path)] = (state.st_mode, *((0, 0) if path.is_dir() else (state.st_size, state.st_mtime_ns)))
    return found


@contextmanager
def may_raise(naming: str) -> Iterator[None]:
    """What is allowed to fail: as ResourceError that names the place and the remedy."""
    failed: ResourceError | None = None
    try:
        yield
    except ResourceError as error:
        failed = error
    assert failed is None or naming in failed.message, f"the error does not name {naming}: {failed}"
    assert failed is None or failed.hint, f"an error without a remedy: {failed}"


class StorageContract:
    """Heirs give `capabilities` and the fixture `kept`."""

    capabilities: StorageCapabilities

    @pytest.fixture
    def kept(self) -> Kept:
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `kept`")

    def provider(self) -> Provider:
        """What is registered under the capabilities' name."""
        return load_plugins().select(self.capabilities.kind, self.capabilities.provider)

    def storage(self) -> Storage:
        """As a command that lists or clears gets it, new each time."""
        storage = self.provider().storage
        assert storage is not None, "the provider has no storage()"
        return storage()

    def stored(self, path: Path) -> Stored:
        """The entry of `path`, which must be listed once."""
        [found] = [one for one in self.storage().stored() if one.path == str(path)]
        return found

    def test_where_nothing_is_kept_nothing_is_listed_or_made(self, kept: Kept) -> None:
        """`stored`: writes nothing, not even the folder that is asked about."""
        before = everything(kept.folder)
        assert list(self.storage().stored()) == []
        assert everything(kept.folder) == before, "to list it changed the disk"

    def test_what_is_there_is_listed_as_it_is(self, kept: Kept) -> None:
        """`Stored`: each thing once, by its own path, with what it takes and when it was used last."""
        paths = [kept.make(), kept.make()]
        before = everything(kept.folder)
        listed = self.storage().stored()
        assert everything(kept.folder) == before, "to list it changed the disk"
        assert sorted(one.path for one in listed) == sorted(map(str, paths))
        for one in listed:
            assert isinstance(one.kind, StoredKind)
            assert one.kind in self.capabilities.kinds
            assert os.path.isabs(one.path)
            assert Path(one.path).exists(), "it lists what is not there"
            assert one.nbytes >= 100, f"{one.nbytes} bytes"
            assert abs(one.used - time.time()) < 600, "it was made just now"
            assert one.user == "", f"nobody uses it, and it says {one.user!r}"

    def test_it_deletes_what_it_is_told_and_nothing_else(self, kept: Kept) -> None:
        """`remove`: True, and the thing is gone, whoever is asked; the others are as before."""
        first, second = kept.make(), kept.make()
        stranger = kept.folder / "not-a-plug-in-s"
        stranger.write_text("of somebody else")
        others = {path: facts for path, facts in everything(second).items() if Path(path) != second}
        assert self.storage().remove(self.stored(first)) is True
        assert not first.exists(), "it says that it has deleted what is there"
        assert second.exists()
        left = {path: facts for path, facts in everything(second).items() if Path(path) != second}
        assert left == others, "another thing was changed"
        assert stranger.read_text() == "of somebody else"
        assert [one.path for one in self.storage().stored()] == [str(second)]

    def test_what_is_in_use_stays(self, kept: Kept) -> None:
        """`user` says who needs it now, in words; `remove` gives False and touches nothing of it. Afterwards
        it goes, also by what was listed before."""
        path = kept.make()
        before = self.stored(path)
        with kept.use(path):
            listed = self.stored(path)
            assert listed.user, "somebody uses it, and nobody is named"
            there = everything(kept.folder)
            for one in (before, listed):
                assert self.storage().remove(one) is False, "it deletes what is in use, or says so"
            assert everything(kept.folder) == there, "it has touched what is in use"
        assert self.stored(path).user == ""
        assert self.storage().remove(listed) is True
        assert not path.exists()

    def test_what_is_gone_already_is_no_defect(self, kept: Kept) -> None:
        """`remove` of what another one has deleted: True, or ResourceError; nothing else is deleted."""
        path, other = kept.make(), kept.make()
        listed = self.stored(path)
        assert self.storage().remove(listed) is True
        with may_raise(str(path)):
            assert self.storage().remove(listed) is True
        assert other.exists()

    def test_it_deletes_nothing_that_it_does_not_keep(self, kept: Kept) -> None:
        """`remove` of a path that it would not list: ResourceError that names it, and everything stays. A
        storage is asked for by name only; paths come from a user's command line."""
        path = kept.make()
        listed = self.stored(path)
        outside = kept.folder / "outside"
        outside.mkdir()
        (outside / "file").write_text("of somebody else")
        within = next((one for one in sorted(path.rglob("*")) if one.is_file()), None)
        roundabout = path.parent / "x" / ".." / ".." / outside.name
        before = everything(kept.folder)
        above = path.parent / ".."
        for wrong in (outside, outside / "file", path.parent, path.parent.parent, above, roundabout, within):
            if wrong is None:
                continue
            with pytest.raises(ResourceError) as caught:
                self.storage().remove(replace(listed, path=str(wrong)))
            assert str(wrong) in caught.value.message, f"the error does not name it: {caught.value}"
            assert everything(kept.folder) == before, f"something went with {wrong}"

    def test_a_place_that_cannot_be_read_is_a_resource_error(self, kept: Kept) -> None:
        """`stored` raises ResourceError and nothing else; a file where a folder should be holds nothing."""
        path = kept.make()
        listed = self.stored(path)
        folder = path.parent
        folder.rename(folder.with_name("aside"))
        folder.write_text("no folder")
        with may_raise(str(folder.parent)):
            assert list(self.storage().stored()) == []
        with may_raise(str(path)):
            self.storage().remove(listed)
        assert folder.read_text() == "no folder"
