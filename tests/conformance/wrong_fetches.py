"""The loader of small files, whose models are elsewhere, with one thing broken at a time.

The wrapping is that of `wrong_loaders.py`, whose `TestUnbroken` it shares.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from file_loader import LAYERS, PRE, FarModel, FileModel, FileTokenizer, Progress, silent
from file_loader import WrongLoader as Wrong
from swactor_core.errors import ModelError, UsageError
from swactor_core.spi.loader import TensorRef
from swactor_testing.synthetic import VOCABULARY
from wrong_kit import caught_by

HERE = "test_a_model_that_is_here_is_not_fetched"
OUTSIDE = "test_layers_outside_the_model_are_not_fetched"
SAME = "test_a_distant_model_says_the_same_as_a_local_one"
BRINGS = "test_a_fetch_brings_its_layers_and_no_others"
PROGRESS = "test_progress_goes_to_its_total"
ENDED = "test_what_progress_raises_ends_the_fetch"
CAUSE = "test_what_cannot_be_had_is_a_model_error_with_a_cause"
SUPPRESSED = "test_suppressed_ids_are_those_of_the_file"
OVERRULED = "test_a_pre_tokenizer_overrules_the_files_where_it_is_asked_for"


# --- what is here, and what is missing ---


@caught_by(HERE, r"layers \[0, 4\) are missing")
class TestALocalModelIsMissing(Wrong):
    class model(FileModel):
        def to_fetch(self, start: int, end: int) -> int:
            return sum(tensor.nbytes for tensor in self.manifest(start, end).tensors)


@caught_by(OUTSIDE, "DID NOT RAISE")
class TestFetchesAnyLayers(Wrong):
    class model(FileModel):
        def fetch(self, start: int, end: int, *, progress: Progress = silent) -> None:
            pass


@caught_by(SAME, "digest")
class TestItsDigestIsOfItsPlace(Wrong):
    class far(FarModel):
        def digest(self) -> str:
            return f"{hash(self.path):064x}".replace("-", "0")


@caught_by(BRINGS, "none of them here, to_fetch says 0")
class TestSaysThatNothingIsMissing(Wrong):
    class far(FarModel):
        def to_fetch(self, start: int, end: int) -> int:
            return 0


@caught_by(BRINGS, "layer 1 has 320 bytes, none of them here, to_fetch says")
class TestCountsTheWholeFile(Wrong):
    class far(FarModel):
        def to_fetch(self, start: int, end: int) -> int:
            return super().to_fetch(0, LAYERS)


@caught_by(BRINGS, "to_fetch counts bytes that were fetched")
class TestCountsWhatItHas(Wrong):
    class far(FarModel):
        def to_fetch(self, start: int, end: int) -> int:
            return sum(tensor.nbytes for tensor in self.manifest(start, end).tensors)


# --- what comes ---


@caught_by(BRINGS, "other layers are said to be here, too")
class TestBringsEverything(Wrong):
    class far(FarModel):
        def fetch(self, start: int, end: int, *, progress: Progress | None = None) -> None:
            super().fetch(0, LAYERS, progress=progress)


@caught_by(BRINGS, "fetched: (byte|[0-9]+ bytes arrived)")
class TestLeavesARangeOut(Wrong):
    class far(FarModel):
        def bring(self, tensor: TensorRef) -> None:
            if not tensor.name.startswith("blk.2."):
                super().bring(tensor)


@caught_by(BRINGS, "fetched: byte")
class TestBringsToAnotherPlace(Wrong):
    class far(FarModel):
        def bring(self, tensor: TensorRef) -> None:
            super().bring(tensor)
            with open(self.path, "r+b") as file:
                file.seek(tensor.offset)
                data = file.read(tensor.nbytes)
                file.seek(tensor.offset)
                file.write(b"\0" * 4 + data[:-4])


@caught_by(BRINGS, "what was fetched is unknown to the next one")
class TestRemembersByItself(Wrong):
    class far(FarModel):
        def here(self) -> set[str]:
            return self.__dict__.setdefault("own", set())

        def note(self, tensor: TensorRef) -> None:
            self.here().add(tensor.name)


@caught_by(BRINGS, "what another one fetched is unknown here")
class TestLooksOnce(Wrong):
    class far(FarModel):
        def here(self) -> set[str]:
            if "first" not in self.__dict__:
                self.first = super().here()
            return self.first

        def note(self, tensor: TensorRef) -> None:
            super().note(tensor)
            self.here().add(tensor.name)


# --- progress ---


class Telling(FarModel):
    """`tell` is what the host hears."""

    def fetch(self, start: int, end: int, *, progress: Progress | None = None) -> None:
        heard = progress or silent
        super().fetch(start, end, progress=lambda done, total: self.tell(heard, done, total))

    def tell(self, heard: Progress, done: int, total: int) -> None:
        heard(done, total)


@caught_by(PROGRESS, "progress beyond its total")
class TestProgressExceedsItsTotal(Wrong):
    class far(Telling):
        def tell(self, heard: Progress, done: int, total: int) -> None:
            heard(done + 4096, total)


@caught_by(PROGRESS, "progress went back")
class TestProgressCountsDown(Wrong):
    class far(Telling):
        def tell(self, heard: Progress, done: int, total: int) -> None:
            heard(total - done, total)


@caught_by(PROGRESS, "a fetch is over at")
class TestProgressEndsBeforeTheEnd(Wrong):
    class far(Telling):
        def tell(self, heard: Progress, done: int, total: int) -> None:
            if done < total:
                heard(done, total)


@caught_by(PROGRESS, "a fetch without progress")
class TestFetchesSilently(Wrong):
    class far(Telling):
        def tell(self, heard: Progress, done: int, total: int) -> None:
            pass


@caught_by(PROGRESS, "bytes were missing")
class TestProgressIsInPerCent(Wrong):
    class far(Telling):
        def tell(self, heard: Progress, done: int, total: int) -> None:
            heard(100 * done // total, 100)


@caught_by(ENDED, "DID NOT RAISE")
class TestCannotBeEnded(Wrong):
    class far(Telling):
        def tell(self, heard: Progress, done: int, total: int) -> None:
            with contextlib.suppress(Exception):
                heard(done, total)


@caught_by(ENDED, "ModelError")
class TestAnEndIsItsOwnError(Wrong):
    class far(Telling):
        def tell(self, heard: Progress, done: int, total: int) -> None:
            try:
                heard(done, total)
            except Exception as error:
                raise ModelError("the fetch failed", hint="again") from error


@caught_by(ENDED, "a fetch that was ended at once brought all")
class TestNotesBeforeItBrings(Wrong):
    class far(FarModel):
        def fetch(self, start: int, end: int, *, progress: Progress | None = None) -> None:
            missing = self.missing(start, end)
            for tensor in missing:
                self.note(tensor)
            for tensor in missing:
                (progress or silent)(0, 1)
                self.bring(tensor)


@caught_by("test_what_progress_raises_ends_an_open", "what progress raised did not come out of open")
class TestAnOpenCannotBeEnded(Wrong):
    class far(FarModel):
        def __init__(self, folder: Path, name: str, progress: Progress) -> None:
            with contextlib.suppress(Exception):
                progress(0, 0)
            super().__init__(folder, name, silent)


# --- what cannot be had ---


@caught_by(CAUSE, "no cause")
class TestGivesNoCause(Wrong):
    class far(FarModel):
        def bring(self, tensor: TensorRef) -> None:
            try:
                super().bring(tensor)
            except ModelError as error:
                raise ModelError(error.message, hint=error.hint) from error


@caught_by(CAUSE, "FileNotFoundError")
class TestAMissingSourceIsTheSystemsError(Wrong):
    class far(FarModel):
        def bring(self, tensor: TensorRef) -> None:
            self.source.stat()
            super().bring(tensor)


@caught_by(CAUSE, "is gone")
class TestFetchesWhatItHas(Wrong):
    class far(FarModel):
        def missing(self, start: int, end: int) -> list[TensorRef]:
            return list(self.manifest(start, end).tensors)

        def to_fetch(self, start: int, end: int) -> int:
            return sum(t.nbytes for t in self.missing(start, end) if t.name not in self.here())


@caught_by(CAUSE, "DID NOT RAISE|is gone")
class TestWhatCannotBeHadIsLeftOut(Wrong):
    class far(FarModel):
        def bring(self, tensor: TensorRef) -> None:
            with contextlib.suppress(ModelError):
                super().bring(tensor)


# --- vocabularies ---


@caught_by(SUPPRESSED, "are suppressed")
class TestSuppressesWhatIsNotThere(Wrong):
    class tokenizer(FileTokenizer):
        suppressed = frozenset({VOCABULARY, 1})


@caught_by(SUPPRESSED, "every id is suppressed")
class TestSuppressesEverything(Wrong):
    class tokenizer(FileTokenizer):
        suppressed = frozenset(range(VOCABULARY))


@caught_by(SUPPRESSED, "assert frozenset")
class TestForgetsWhatTheAuthorSaid(Wrong):
    class tokenizer(FileTokenizer):
        suppressed = frozenset()


@caught_by("test_an_unknown_pre_tokenizer_is_refused", "DID NOT RAISE")
class TestTakesAnyPreTokenizer(Wrong):
    class model(FileModel):
        def tokenizer(self, *, pre: str | None = None) -> Any:
            return super().tokenizer(pre=pre if pre == PRE else None)


@caught_by("test_an_unknown_pre_tokenizer_is_refused", "an error without a remedy")
class TestRefusesWithoutARemedy(Wrong):
    class model(FileModel):
        def tokenizer(self, *, pre: str | None = None) -> Any:
            try:
                return super().tokenizer(pre=pre)
            except UsageError as error:
                raise UsageError(error.message) from error


@caught_by(OVERRULED, "no pre-tokenizer of the capabilities overrules")
class TestIgnoresThePreTokenizer(Wrong):
    class model(FileModel):
        def tokenizer(self, *, pre: str | None = None) -> Any:
            super().tokenizer(pre=pre)
            return super().tokenizer()


@caught_by(OVERRULED, "stays for those who did not ask for it")
class TestKeepsThePreTokenizer(Wrong):
    class model(FileModel):
        kept: str | None = None

        def tokenizer(self, *, pre: str | None = None) -> Any:
            self.kept = pre or self.kept
            return super().tokenizer(pre=self.kept)
