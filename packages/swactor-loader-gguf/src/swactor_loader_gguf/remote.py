"""A file on the web whose bytes come into the cache as they are asked for, each of them once a machine.

Joins `web` and `sparse`: knows which content lies in which folder, how processes share the work, and what is
said while it goes on. Must not know GGUF.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

from swactor_core.errors import ModelError
from swactor_core.faults import ModelFailure

from swactor_loader_gguf.asking import HEAD_BYTES, ask, identify
from swactor_loader_gguf.cache import Progress, silent
from swactor_loader_gguf.ranges import Range, cut, joined
from swactor_loader_gguf.reach import Unreachable
from swactor_loader_gguf.sparse import ROOM, WRITABLE, SparseFile
from swactor_loader_gguf.web import WebFile

_HEAD_STEP = 128 << 10  # or a quarter of what is here: few requests, and little too much
_PIECE = 64 << 20  # what one request asks for, and what is claimed at a time
_COMMIT = 8 << 20  # what a killed process loses at most
_GAP = 16 << 10
_SPARE = 32 << 20
_POLL_S = 0.1
_STUCK_S = 300.0
_HASH_BLOCK = 4 << 20


class RemoteFile:
    """The content that `web` has now, or had when it was last asked: see `asking.identify`. Implements
    `header.Contents`. Raises ModelError when it cannot be had.

    `path` is a file of the whole size, of which only fetched ranges hold what they should; `header_progress`
    hears of what `need` fetches; `tag` tells this content from others of the same name, where there are any.
    The server need not be asked for a name that is `fixed` to one content, nor for the `wanted` tag.
    """

    def __init__(
        self, web: WebFile, header_progress: Progress = silent, *, fixed: bool = False, wanted: str = ""
    ) -> None:
        self._header_progress = header_progress
        answer = identify(
            web,
            enough=lambda known: known.is_here,
            settled=lambda known: fixed or known.steady_tag == wanted,
            check=lambda: header_progress(0, 0),
        )
        self._web, self._known, self._fresh = answer.web, answer.known, answer.fresh
        path, self.size = self._known.path, self._known.identity.size
        try:
            self._sparse = SparseFile(path.parent, path.name, self.size)
        except BaseException:
            self._web.close()
            raise
        self.name = self._known.address
        self.tag = "" if fixed else self._known.steady_tag
        self.path = self._sparse.path

    def close(self) -> None:
        """Idempotent."""
        self._web.close()
        self._sparse.close()

    def need(self, end: int) -> int:
        """Makes the first `end` bytes readable, and some more; returns how many are."""
        here = self._sparse.present.prefix()
        if here < min(end, self.size):
            here = min(max(end, here + max(_HEAD_STEP, here // 4) if here else HEAD_BYTES), self.size)
            try:
                self.fetch([(0, here)], self._header_progress)
            except Unreachable as error:
                raise error.lacking(self.missing([(0, end)])) from error
        return self._sparse.present.prefix()

    def missing(self, ranges: list[Range]) -> int:
        """Bytes of `ranges` that are not on this machine."""
        self._sparse.refresh()
        return sum(end - start for start, end in self._sparse.missing(ranges))

    def fetch(self, ranges: list[Range], progress: Progress = silent) -> None:
        """Makes `ranges` readable; `progress(done, total)` in bytes of them, from the beginning on. Raises
        ModelError, and whatever `progress` raises."""
        wanted, sparse = joined(ranges, gap=_GAP), self._sparse
        total = sum(end - start for start, end in wanted)
        pieces = cut(wanted, most=_PIECE)
        stuck_since, last, next_word = time.monotonic(), -1, 0.0

        def left() -> int:
            return sum(end - start for start, end in sparse.missing(wanted))

        def said(uncommitted: int = 0) -> None:
            nonlocal next_word
            if (now := time.monotonic()) >= next_word:
                next_word = now + _POLL_S
                progress(total - left() + uncommitted, total)

        sparse.refresh()
        if left():
            self._make_sure(progress)
            self._check_room(left())
        while remaining := left():
            said()
            if remaining != last:
                stuck_since, last = time.monotonic(), remaining
            for piece in pieces:
                if sparse.missing([piece]):
                    self._fetch_piece(piece, said)
            sparse.refresh()
            if left() != remaining:
                continue
            # Everything that is missing is being brought by others.
            if time.monotonic() - stuck_since > _STUCK_S:
                raise ModelError(
                    f"another process holds parts of {self.name} and brings nothing since {_STUCK_S:.0f} s",
                    hint=f"end it, or set SWACTOR_CACHE_DIR to another folder (its file: {self.path})",
                    cause=ModelFailure.CACHE_UNUSABLE,
                )
            time.sleep(_POLL_S)  # a lock of the kernel's wakes nobody who also has to look at a clock
        progress(total, total)
        self._verify()

    def _make_sure(self, progress: Progress) -> None:
        """Before a byte is added to what is here: that the server still has that content."""
        if self._fresh:
            return
        now = ask(self._web, lambda: progress(0, 0))
        if now.key != self._known.key:
            raise ModelError(
                f"{self.name} has changed since {self._known.since}: what is here is of no use any more",
                hint="run again, and the new content is fetched",
                cause=ModelFailure.CONTENT_CHANGED,
            )
        self._fresh = True

    def _check_room(self, need: int) -> None:
        if not self._sparse.writable:
            raise ModelError(
                f"{self.path!r} lacks {need} bytes of {self.name} and may not be written",
                hint=WRITABLE,
                cause=ModelFailure.CACHE_UNUSABLE,
            )
        free = self._sparse.free_bytes()
        if free < need + _SPARE:
            raise ModelError(
                f"{self.name} needs {(need + _SPARE >> 20) + 1} MiB on the disk of {self.path!r}, which has "
                f"{free >> 20} MiB free",
                hint=ROOM,
                cause=ModelFailure.DISK_FULL,
            )

    def _fetch_piece(self, piece: Range, said: Callable[[int], None]) -> None:
        """Brings what is missing of `piece` unless somebody else is at it."""
        claim = self._sparse.claim(*piece)
        if claim is None:
            return
        with claim:
            self._sparse.refresh()
            for start, end in self._sparse.missing([piece]):
                self._bring(start, end, said)

    def _bring(self, start: int, end: int, said: Callable[[int], None]) -> None:
        sparse, written, committed = self._sparse, start, start

        def check() -> None:
            said(written - committed)

        try:
            for block in self._web.stream(start, end, check=check):
                sparse.write(written, block)
                written += len(block)
                if written - committed >= _COMMIT:
                    sparse.commit(committed, written)
                    committed = written
        finally:
            sparse.commit(committed, written)

    def _verify(self) -> None:
        """Compares the content with the checksum that its source names, once everything is here."""
        sha256, sparse = self._known.identity.sha256, self._sparse
        if not sha256 or sparse.verified or not sparse.writable or not sparse.present.covers(0, self.size):
            return
        state = hashlib.sha256()
        with open(self.path, "rb", buffering=0) as file:
            while block := file.read(_HASH_BLOCK):
                state.update(block)
        if state.hexdigest() != sha256:
            sparse.forget()
            raise ModelError(
                f"{self.name} has SHA-256 {state.hexdigest()}, its source says {sha256}",
                hint="run again to fetch it anew; if that does not help, the source is damaged",
                cause=ModelFailure.CHECKSUM_MISMATCH,
            )
        sparse.mark_verified()
