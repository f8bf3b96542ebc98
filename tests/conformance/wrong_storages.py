"""A storage of folders with one thing broken at a time."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest
from swactor_core.errors import ResourceError
from swactor_core.spi.provider import Kind, Provider
from swactor_core.spi.storage import Stored, StoredKind
from swactor_testing.conformance import Kept, StorageCapabilities, StorageContract
from wrong_kit import caught_by

NOTHING = "test_where_nothing_is_kept_nothing_is_listed_or_made"
LISTED = "test_what_is_there_is_listed_as_it_is"
TOLD = "test_it_deletes_what_it_is_told_and_nothing_else"
USED = "test_what_is_in_use_stays"
GONE = "test_what_is_gone_already_is_no_defect"
NOT_ITS = "test_it_deletes_nothing_that_it_does_not_keep"
UNREADABLE = "test_a_place_that_cannot_be_read_is_a_resource_error"


class Folders:
    """Keeps the folders of `home`; one with a file `lock` in it is in use."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def stored(self) -> list[Stored]:
        if not self.home.is_dir():
            return []
        return [self.described(path) for path in sorted(self.home.iterdir())]

    def described(self, path: Path) -> Stored:
        nbytes = sum(one.stat().st_size for one in path.iterdir())
        user = "somebody" if (path / "lock").exists() else ""
        return Stored(StoredKind.TEMPORARY, str(path), nbytes, path.stat().st_mtime, user)

    def remove(self, stored: Stored) -> bool:
        path = self.known(stored)
        if self.described(path).user:
            return False
        shutil.rmtree(path)
        return True

    def known(self, stored: Stored) -> Path:
        path = Path(stored.path)
        if not self.home.is_dir() or path not in self.home.iterdir():
            raise ResourceError(f"{stored.path} is not kept here", hint="list again")
        return path


class Wrong(StorageContract):
    capabilities = StorageCapabilities(Kind.LOADER, "folders", (StoredKind.TEMPORARY,))
    storage_class: ClassVar[type] = Folders
    home: ClassVar[Path]

    def provider(self) -> Provider:
        made = type(self)
        return Provider(
            Kind.LOADER, "folders", "", lambda: None, storage=lambda: made.storage_class(made.home)
        )

    @pytest.fixture
    def kept(self, tmp_path: Path) -> Kept:
        home = type(self).home = tmp_path / "home"
        numbers = itertools.count()

        def make() -> Path:
            folder = home / f"kept-{next(numbers)}"
            folder.mkdir(parents=True)
            (folder / "content").write_bytes(bytes(1000))
            return folder

        @contextmanager
        def use(path: Path) -> Iterator[None]:
            (path / "lock").touch()
            yield
            (path / "lock").unlink()

        return Kept(tmp_path, make, use)


class TestUnbroken(Wrong):
    pass


@caught_by(NOTHING, "to list it changed the disk")
class TestMakesItsFolderWhenAsked(Wrong):
    class storage_class(Folders):
        def stored(self) -> list[Stored]:
            self.home.mkdir(exist_ok=True)
            return super().stored()


@caught_by(NOTHING, "assert .* == \\[\\]")
class TestListsWhatIsNotThere(Wrong):
    class storage_class(Folders):
        def stored(self) -> list[Stored]:
            return [Stored(StoredKind.TEMPORARY, str(self.home / "x"), 100, time.time(), "")]


@caught_by(LISTED, "kept-1")
class TestListsTheFirstOnly(Wrong):
    class storage_class(Folders):
        def stored(self) -> list[Stored]:
            return super().stored()[:1]


@caught_by(LISTED, "KERNELS|kernels")
class TestSaysAnotherKind(Wrong):
    class storage_class(Folders):
        def described(self, path: Path) -> Stored:
            found = super().described(path)
            return Stored(StoredKind.KERNELS, found.path, found.nbytes, found.used, found.user)


@caught_by(LISTED, "0 bytes")
class TestSaysThatItTakesNothing(Wrong):
    class storage_class(Folders):
        def described(self, path: Path) -> Stored:
            found = super().described(path)
            return Stored(found.kind, found.path, 0, found.used, found.user)


@caught_by(LISTED, "it was made just now")
class TestSaysMilliseconds(Wrong):
    class storage_class(Folders):
        def described(self, path: Path) -> Stored:
            found = super().described(path)
            return Stored(found.kind, found.path, found.nbytes, 1000 * found.used, found.user)


@caught_by(LISTED, "nobody uses it")
class TestSaysThatEverythingIsUsed(Wrong):
    class storage_class(Folders):
        def described(self, path: Path) -> Stored:
            found = super().described(path)
            return Stored(found.kind, found.path, found.nbytes, found.used, "somebody")


@caught_by(TOLD, "it says that it has deleted what is there")
class TestDeletesInWordsOnly(Wrong):
    class storage_class(Folders):
        def remove(self, stored: Stored) -> bool:
            self.known(stored)
            return True


@caught_by(TOLD, "assert False")
class TestDeletesEverything(Wrong):
    class storage_class(Folders):
        def remove(self, stored: Stored) -> bool:
            shutil.rmtree(self.known(stored).parent)
            return True


@caught_by(TOLD, "another thing was changed")
class TestWritesIntoTheOthers(Wrong):
    class storage_class(Folders):
        def remove(self, stored: Stored) -> bool:
            removed = super().remove(stored)
            for path in self.home.iterdir():
                (path / "content").write_bytes(bytes(999))
            return removed


@caught_by(USED, "nobody is named")
class TestDoesNotSeeItsUse(Wrong):
    class storage_class(Folders):
        def described(self, path: Path) -> Stored:
            found = super().described(path)
            return Stored(found.kind, found.path, found.nbytes, found.used, "")


@caught_by(USED, "it deletes what is in use")
class TestDeletesWhatIsUsed(Wrong):
    class storage_class(Folders):
        def remove(self, stored: Stored) -> bool:
            shutil.rmtree(self.known(stored))
            return True


@caught_by(USED, "it deletes what is in use, or says so")
class TestBelievesWhatWasListed(Wrong):
    class storage_class(Folders):
        def remove(self, stored: Stored) -> bool:
            path = self.known(stored)
            if stored.user:
                return False
            shutil.rmtree(path)
            return True


@caught_by(USED, "it has touched what is in use")
class TestDeletesHalfOfWhatIsUsed(Wrong):
    class storage_class(Folders):
        def remove(self, stored: Stored) -> bool:
            path = self.known(stored)
            (path / "content").unlink(missing_ok=True)
            return super().remove(stored)


@caught_by(GONE, "FileNotFoundError")
class TestFailsWhereNothingIs(Wrong):
    class storage_class(Folders):
        def known(self, stored: Stored) -> Path:
            return Path(stored.path)


@caught_by(NOT_ITS, "DID NOT RAISE")
class TestDeletesAnyPath(Wrong):
    class storage_class(Folders):
        def remove(self, stored: Stored) -> bool:
            shutil.rmtree(stored.path, ignore_errors=True)
            return True


@caught_by(NOT_ITS, "DID NOT RAISE")
class TestLooksAtTheParentOnly(Wrong):
    """`home/..` has the right parent by its words."""

    class storage_class(Folders):
        def known(self, stored: Stored) -> Path:
            path = Path(stored.path)
            if path.parent != self.home:
                raise ResourceError(f"{stored.path} is not kept here", hint="list again")
            return path

        def remove(self, stored: Stored) -> bool:
            shutil.rmtree(self.known(stored), ignore_errors=True)
            return True


@caught_by(NOT_ITS, "does not name it")
class TestDoesNotSayWhatItDoesNotKeep(Wrong):
    class storage_class(Folders):
        def known(self, stored: Stored) -> Path:
            try:
                return super().known(stored)
            except ResourceError:
                raise ResourceError("no such thing", hint="list again") from None


@caught_by(UNREADABLE, "NotADirectoryError")
class TestFailsInThePlacesOwnWords(Wrong):
    class storage_class(Folders):
        def stored(self) -> list[Stored]:
            if not self.home.exists():
                return []
            return [self.described(path) for path in sorted(self.home.iterdir())]


@caught_by(UNREADABLE, "an error without a remedy")
class TestFailsWithoutARemedy(Wrong):
    class storage_class(Folders):
        def stored(self) -> list[Stored]:
            if self.home.is_file():
                raise ResourceError(f"{self.home} is no folder")
            return super().stored()
