"""What an address was when its server last said so, kept in the cache: a run whose bytes are here needs no
network.

One small file an address in the cache's `addresses`, named by the digest of the whole address but for a
signature (`signatures`): what a query says may tell two contents apart, and may be a secret. It is written by
a rename and believed only when it is whole; one that is damaged counts as absent. It lives as long as the
content that it speaks of. Must not know networks.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from contextlib import suppress
from dataclasses import asdict, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from swactor_core.values import frozen
from swactor_core.whole_files import write_whole

from swactor_loader_gguf.cache import cache_directory
from swactor_loader_gguf.signatures import unsigned

_FOLDER = "addresses"
_LONGEST = 1 << 16


@frozen
class Identity:
    """Which content an address has. `validator` is the server's tag for it, empty where there is none;
    `sha256` is of the whole content where the source names it; `revision` pins it where sources have them."""

    size: int
    validator: str
    sha256: str = ""
    revision: str = ""


@frozen
class Known:
    """The identity that `address` had at `asked`, in seconds since 1970. `head` is the digest of the first
    bytes, where the server has no tag: nothing else tells one content from the next."""

    address: str
    identity: Identity
    head: str = ""
    asked: float = field(default_factory=time.time)

    @property
    def tag(self) -> str:
        """What tells this content from another one of the same name."""
        return self.identity.sha256 or self.identity.validator or self.head

    @property
    def steady_tag(self) -> str:
        """The same, without what a proxy may put in front of it."""
        return self.tag.removeprefix("W/")

    @property
    def key(self) -> str:
        """The name of the content's folder: its own digest where it is known, else one of address, size and
        tag."""
        if self.identity.sha256:
            return self.identity.sha256
        return hashlib.sha256(f"{self.address}\n{self.identity.size}\n{self.tag}".encode()).hexdigest()

    @property
    def path(self) -> Path:
        """Where the content lies, or would."""
        last = unquote(os.path.basename(urlsplit(self.address).path))
        name = re.sub(r"[^A-Za-z0-9._-]", "_", last)[-120:].lstrip(".") or "model.gguf"
        return cache_directory() / "remote" / self.key / name

    @property
    def is_here(self) -> bool:
        """Whether there is a file of this content, of which parts may be missing."""
        try:
            return self.path.stat().st_size == self.identity.size
        except OSError:
            return False

    @property
    def since(self) -> str:
        """When it was asked for, to the second, for people."""
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.asked))


def shown(url: str) -> str:
    """The address for people and logs: without credentials, query and fragment."""
    return re.sub(r"//[^/@]*@", "//", re.split(r"[?#]", url, maxsplit=1)[0])


def recall(url: str) -> Known | None:
    """What is kept of `url`; None where that is nothing, or cannot be believed."""
    return _read(_file(url))


def keep(url: str, known: Known) -> None:
    """Writes it down for later. A cache that cannot be written keeps nothing: the run needs none of it."""
    file = _file(url)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, _text(known).encode())


def addresses_by_key() -> dict[str, list[Known]]:
    """What is kept of each content, by its folder's name; the one asked for last first."""
    found: dict[str, list[Known]] = {}
    for file in (cache_directory() / _FOLDER).glob("[!.]*"):
        if (known := _read(file)) is not None:
            found.setdefault(known.key, []).append(known)
    for held in found.values():
        held.sort(key=lambda known: -known.asked)
    return found


def forget_lost() -> None:
    """Removes what speaks of contents that are not in the cache any more, and what a killed writer has left.
    Raises OSError."""
    found = (cache_directory() / _FOLDER).glob("*")
    files = {file: None if file.name.startswith(".") else _read(file) for file in found}
    held = {known for known in files.values() if known is not None and known.path.parent.is_dir()}
    # A name that stands for a revision has no folder of its own where its source names no digest.
    revisions = {known.identity.revision for known in held} - {""}
    for file, known in files.items():
        if known is None or not (known in held or known.identity.revision in revisions):
            file.unlink(missing_ok=True)


def _file(url: str) -> Path:
    name = unsigned(url).encode("utf-8", "surrogateescape")
    return cache_directory() / _FOLDER / hashlib.sha256(name).hexdigest()


def _text(known: Known) -> str:
    text = json.dumps(asdict(known), sort_keys=True)
    return f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}\n"


def _read(file: Path) -> Known | None:
    try:
        with file.open("rb") as stream:
            said, _, text = stream.read(_LONGEST).decode().partition("\n")
        text = text.removesuffix("\n")
        if hashlib.sha256(text.encode()).hexdigest() != said:
            return None
        held = json.loads(text)
        return Known(**{**held, "identity": Identity(**held["identity"])})
    except (OSError, ValueError, TypeError, KeyError):  # of another version, torn, or no file
        return None
