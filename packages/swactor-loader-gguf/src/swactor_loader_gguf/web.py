"""Byte ranges of one file over HTTP: where it is, how large, which content, and streams of its bytes.

Knows HTTP (RFC 9110: ranges, validators), redirects, who may see a credential, and which failures are worth
another try. Must not know GGUF or the cache. An address may hold a signature: only `shown` reaches people.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import random
import re
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import NoReturn
from urllib.parse import urljoin, urlsplit

import httpx2
from swactor_core.errors import ModelError
from swactor_core.faults import ModelFailure
from swactor_core.values import frozen

from swactor_loader_gguf.known import Identity, shown
from swactor_loader_gguf.reach import Unreachable, refuse_when_offline

_log = logging.getLogger(__name__)
# Both tell whole addresses, signatures and all, to whoever listens at level INFO.
for _name in ("httpx2", "httpcore2"):
    logging.getLogger(_name).setLevel(logging.WARNING)

HTTP_HOSTS = "SWACTOR_HTTP_HOSTS"
MAX_REDIRECTS = 5
MAX_BYTES = 1 << 44
_CHECK_S = 0.1
_DENIED = "check the address and its signature"
_REACH = "check the address, the network and the proxy, or download the file and give its path"
_DOWNLOAD = "download the file and give its path, or use a server that supports ranges"
_PAGE = "give the address of the file itself, as its download link has it"
_QUIET_PAUSE_S = 2.0  # a shorter wait between tries is not worth a word
_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
_MOVED = frozenset({301, 302, 303, 307, 308})
_EXPIRED = frozenset({400, 401, 403, 404, 410})
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")


@frozen
class Patience:
    """Bounds of one source: seconds to connect and between two bytes, bytes a second below which a stream is
    given up after `idle` seconds, tries in a row that bring less than `progress_bytes`, and seconds before
    the second try, doubled for each that follows. A server that asks for more than `longest_asked` seconds is
    not waited for."""

    connect: float = 10.0
    idle: float = 15.0
    least_speed: int = 1024
    tries: int = 5
    progress_bytes: int = 1 << 16
    first_pause: float = 0.5
    longest_pause: float = 30.0
    longest_asked: float = 120.0


_HURRIED = Patience(connect=4.0, idle=6.0, tries=2, first_pause=0.3, longest_asked=2.0)


class _TryAgain(Exception):
    """A failure that another try may mend. `pause` is what the server asks for, in seconds."""

    def __init__(self, why: str, pause: float = 0.0) -> None:
        super().__init__(why)
        self.pause = pause


def check_address(url: str) -> None:
    """Raises ModelError for an address that models are not fetched from: not https, and neither loopback nor
    a host that SWACTOR_HTTP_HOSTS lists."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError as error:
        raise ModelError(f"{shown(url)!r} is not an address: {error}", hint="check the address") from error
    if not host:
        raise ModelError(f"{shown(url)!r} names no host", hint="write https://host/path/model.gguf")
    if parts.username or parts.password:
        raise ModelError(
            f"the address {shown(url)!r} carries a password",
            hint="give an address without one; a signed address, or HF_TOKEN for hf: names",
        )
    if parts.scheme == "https" or (parts.scheme == "http" and (_is_loopback(host) or host in _http_hosts())):
        return
    raise ModelError(
        f"models are not fetched over {parts.scheme} from {host!r}",
        hint=f"use https, or list the host in {HTTP_HOSTS} if you trust the network to it",
        cause=ModelFailure.ACCESS_DENIED,
    )


def _http_hosts() -> set[str]:
    return {host.strip() for host in os.environ.get(HTTP_HOSTS, "").split(",")} - {""}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class WebFile:
    """The file at `url`. `token` goes to that address's own host and to no other; `denied_hint` is the remedy
    when the server refuses. Not for several threads at once."""

    def __init__(
        self, url: str, *, token: str = "", denied_hint: str = _DENIED, patience: Patience | None = None
    ) -> None:
        check_address(url)
        if not re.fullmatch(r"[!-~]*", token):
            raise ModelError(
                f"the token for {shown(url)} has characters that no token has",
                hint="set HF_TOKEN to the token alone, without blanks and line ends",
                cause=ModelFailure.ACCESS_DENIED,
            )
        self.url = url
        self._token = token
        self._denied_hint = denied_hint
        self._patience = patience or Patience()
        self._identity: Identity | None = None
        self._place: str | None = None  # where redirects led to
        self._place_tag = ""
        self._linked = ("", 0, "")
        self._client: httpx2.Client | None = None  # made when first asked: most files are here already

    def close(self) -> None:
        """Closes the connections. Idempotent."""
        if self._client is not None:
            self._client.close()

    def hurried(self) -> WebFile:
        """The same file, asked for with the patience of somebody who can do without an answer."""
        own = self._patience
        patience = replace(
            own,
            connect=min(own.connect, _HURRIED.connect),
            idle=min(own.idle, _HURRIED.idle),
            tries=min(own.tries, _HURRIED.tries),
            first_pause=min(own.first_pause, _HURRIED.first_pause),
            longest_asked=min(own.longest_asked, _HURRIED.longest_asked),
        )
        return WebFile(self.url, token=self._token, denied_hint=self._denied_hint, patience=patience)

    def as_patient_as(self, other: WebFile) -> None:
        """From now on. Connections stay."""
        self._patience = other._patience

    @property
    def identity(self) -> Identity:
        """Raises AssertionError before `probe`."""
        assert self._identity is not None
        return self._identity

    def probe(self, check: Callable[[], None] = lambda: None) -> Identity:
        """Asks for the first byte and learns what the file is. `check` is called between tries. Raises
        ModelError."""
        retries = _Retries(self.url, self._patience, check)
        while True:
            try:
                with self._response(0, 1) as response:
                    for _ in _blocks(response, most=1):
                        check()
                    return self.identity
            except _TryAgain as error:
                retries.after(error)

    def stream(self, start: int, end: int, *, check: Callable[[], None]) -> Iterator[bytes]:
        """The bytes [start, end) in blocks as the network brings them, going on where a connection was cut.
        `check` is called between blocks and tries. Raises ModelError, and whatever `check` raises."""
        retries = _Retries(self.url, self._patience, check)
        position = start
        while position < end:
            begun = position
            try:
                with self._response(position, end) as response:
                    pace = _Pace(self._patience)
                    for block in _blocks(response, most=end - position):
                        position += len(block)
                        yield block
                        check()
                        pace.after(len(block))
                if position == begun:
                    raise _TryAgain("the answer has no byte")
            except _TryAgain as error:
                retries.after(error, good=position - begun >= self._patience.progress_bytes)

    @contextmanager
    def _response(self, start: int, end: int) -> Iterator[httpx2.Response]:
        """An answer that holds a beginning of [start, end) and nothing else, redirects followed. Raises
        _TryAgain for what another try may mend, also for what goes wrong while the body is read."""
        refuse_when_offline(shown(self.url))
        client = self._client = self._client or _client()
        timeout = httpx2.Timeout(self._patience.idle, connect=self._patience.connect)
        try:
            url, hops = self._place or self.url, 0
            while True:
                headers = self._headers(url, start, end)
                with client.stream("GET", url, headers=headers, timeout=timeout) as response:
                    status = response.status_code
                    if url == self.url:
                        self._linked = _linked(response.headers)
                    if status not in _MOVED and not (url == self._place != self.url and status in _EXPIRED):
                        self._accept(response, url, start, end)
                        yield response
                        return
                    if status in _MOVED:
                        url = self._redirected(url, response.headers.get("location", ""))
                    else:  # a signed address that has run out: ask where the file is now
                        url = self.url
                        self._place = None
                hops += 1
                if hops > MAX_REDIRECTS:
                    raise ModelError(
                        f"{shown(self.url)} redirects more than {MAX_REDIRECTS} times, last to {shown(url)}",
                        hint=_REACH,
                        cause=ModelFailure.SOURCE_UNREACHABLE,
                    )
        except (httpx2.UnsupportedProtocol, httpx2.InvalidURL) as error:
            self._fail(f"cannot be asked for: {error}", ModelFailure.NOT_FOUND)
        except (httpx2.TransportError, httpx2.StreamError) as error:
            if isinstance(_root(error), ssl.SSLCertVerificationError):
                raise ModelError(
                    f"the certificate of {shown(self.url)} is not trusted: {_root(error)}",
                    hint="name the right certificates with SSL_CERT_FILE",
                    cause=ModelFailure.SOURCE_UNREACHABLE,
                ) from error
            raise _TryAgain(f"{type(error).__name__}: {error}") from error

    def _headers(self, url: str, start: int, end: int) -> dict[str, str]:
        headers = {"Range": f"bytes={start}-{end - 1}"}
        if self._token and _origin(url) == _origin(self.url):
            headers["Authorization"] = f"Bearer {self._token}"
        return headers

    def _redirected(self, url: str, location: str) -> str:
        if not location:
            self._fail("redirects without saying where to", ModelFailure.SOURCE_UNREACHABLE)
        try:
            target = urljoin(url, location)
            if urlsplit(url).scheme == "https" != urlsplit(target).scheme:
                self._fail(f"redirects from https to {shown(target)}", ModelFailure.ACCESS_DENIED)
            check_address(target)
        except ValueError as error:
            self._fail(f"redirects to what is no address: {error}", ModelFailure.SOURCE_UNREACHABLE)
        except ModelError as error:
            if error.message.startswith(shown(self.url)):
                raise
            self._fail(f"redirects to {shown(target)}: {error.message}", error.cause, hint=error.hint)
        return target

    def _fail(self, what: str, cause: ModelFailure, *, hint: str = _REACH) -> NoReturn:
        raise ModelError(f"{shown(self.url)} {what}", hint=hint, cause=cause)

    def _accept(self, response: httpx2.Response, url: str, start: int, end: int) -> None:
        """Returns for a part of the file that the identity stands for, and raises otherwise."""
        status = response.status_code
        if status in _AGAIN:
            raise _TryAgain(f"status {status}", _retry_after(response.headers.get("retry-after", "")))
        if status in (401, 403, 407):
            self._fail(
                f"may not be read: status {status}", ModelFailure.ACCESS_DENIED, hint=self._denied_hint
            )
        if status in (404, 410):
            self._fail(f"is not there: status {status}", ModelFailure.NOT_FOUND, hint="check the address")
        if status == 416 and self._identity is not None:
            self._changed("is shorter than before")
        part = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        if status != 206 or part is None or _encoded(response.headers):
            self._refuse_answer(response)
        first, last, total = (int(number) for number in part.groups())
        if first != start or not start <= last < min(end, total) or total > MAX_BYTES:
            self._fail(
                f"answers with bytes {first} to {last} of {total} where {start} to {end - 1} were asked for",
                ModelFailure.RANGES_UNSUPPORTED,
            )
        stated = response.headers.get("content-length")
        if stated is not None and stated != str(last + 1 - first):
            raise _TryAgain(f"an answer of {stated} bytes where it says {last + 1 - first}")
        self._recognise(response.headers, url, total)

    def _refuse_answer(self, response: httpx2.Response) -> NoReturn:
        """Says what an answer is that is no part of a file."""
        status, headers = response.status_code, response.headers
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        empty = headers.get("content-length") == "0" if status == 200 else status == 416
        if empty and not _encoded(headers):
            self._fail("is empty", ModelFailure.MALFORMED, hint="fetch it anew where it comes from")
        if status == 200 and kind in ("text/html", "application/xhtml+xml"):
            self._fail(f"is a web page ({kind}), not a model", ModelFailure.REFUSED, hint=_PAGE)
        about = "an encoded answer" if _encoded(headers) else f"status {status}"
        if status in (200, 206, 416):
            what = f"does not give byte ranges ({about} to a request for some)"
            self._fail(what, ModelFailure.RANGES_UNSUPPORTED, hint=_DOWNLOAD)
        self._fail(f"gives {about}", ModelFailure.SOURCE_UNREACHABLE)

    def _recognise(self, headers: httpx2.Headers, url: str, total: int) -> None:
        tag = headers.get("etag") or headers.get("last-modified") or ""
        validator, size, revision = self._linked
        if size and size != total:
            self._changed(f"is said to have {size} bytes and has {total}")
        if self._identity is None:
            sha256 = validator if re.fullmatch(r"[0-9a-f]{64}", validator) else ""
            self._identity = Identity(total, validator or tag, sha256, revision)
        elif total != self._identity.size:
            self._changed(f"had {self._identity.size} bytes and has {total}")
        else:
            elsewhere = url == self._place and tag != self._place_tag
            if elsewhere or (validator or tag) != self._identity.validator:
                self._changed("has another entity tag than before")
        self._place, self._place_tag = url, tag

    def _changed(self, what: str) -> NoReturn:
        self._fail(
            f"has changed: it {what}",
            ModelFailure.CONTENT_CHANGED,
            hint="run again; use an address whose content does not change",
        )


class _Retries:
    """Counts failures in a row and waits between tries, longer each time."""

    def __init__(self, url: str, patience: Patience, check: Callable[[], None]) -> None:
        self._url = url
        self._patience = patience
        self._check = check
        self._failures = 0

    def after(self, error: _TryAgain, *, good: bool = False) -> None:
        """Returns when it is time for the next try. `good`: the one before got somewhere. Raises ModelError
        when it was the last."""
        patience = self._patience
        self._failures = 1 if good else self._failures + 1
        if error.pause > patience.longest_asked:
            raise Unreachable(
                f"{shown(self._url)} asks to come back in {error.pause:.0f} s: {error}",
                hint="run again then; what was fetched is kept",
                why=str(error),
            ) from error
        if self._failures >= patience.tries:
            tries = f"{self._failures} tries" if self._failures > 1 else "one try"
            raise Unreachable(
                f"{shown(self._url)} could not be read in {tries}: {error}", hint=_REACH, why=str(error)
            ) from error
        pause = patience.first_pause * 2.0 ** (self._failures - 1)
        pause *= random.uniform(0.7, 1.3)  # noqa: S311 - so that stages do not come back all at once
        pause = max(min(pause, patience.longest_pause), error.pause)
        if pause >= _QUIET_PAUSE_S:
            _log.warning("%s: %s; the next try is in %.0f s", shown(self._url), error, pause)
        until = time.monotonic() + pause
        while (left := until - time.monotonic()) > 0:
            self._check()
            time.sleep(min(left, _CHECK_S))
        self._check()


class _Pace:
    """Gives up a stream that goes on but gets nowhere."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._since = time.monotonic()
        self._nbytes = 0

    def after(self, nbytes: int) -> None:
        self._nbytes += nbytes
        spent = time.monotonic() - self._since
        if spent < self._patience.idle:
            return
        if self._nbytes < spent * self._patience.least_speed:
            raise _TryAgain(f"{self._nbytes} bytes in {spent:.0f} s")
        self._since, self._nbytes = time.monotonic(), 0


def _client() -> httpx2.Client:
    """Raises ModelError for certificates and proxies of the environment that cannot be used."""
    file, folder = os.environ.get("SSL_CERT_FILE", ""), os.environ.get("SSL_CERT_DIR", "")
    try:
        return httpx2.Client(
            verify=_trusted(file, folder, _written_at(file)),
            follow_redirects=False,
            headers={"User-Agent": "swactor", "Accept-Encoding": "identity"},
        )
    except OSError as error:  # of which an ssl.SSLError is one
        raise ModelError(
            f"the certificates of SSL_CERT_FILE {file!r} cannot be read: {error.strerror or error}",
            hint="name a file of certificates in PEM format, or unset SSL_CERT_FILE",
            cause=ModelFailure.SOURCE_UNREACHABLE,
        ) from error
    except (ValueError, ImportError, httpx2.InvalidURL) as error:
        raise ModelError(
            "the proxy of HTTP_PROXY, HTTPS_PROXY or ALL_PROXY cannot be used: it is no http:// or https:// "
            "address",
            hint="set it like http://host:port, or name the model's host in NO_PROXY",
            cause=ModelFailure.SOURCE_UNREACHABLE,
        ) from error


@lru_cache(maxsize=1)
def _trusted(file: str, folder: str, written_at: int) -> ssl.SSLContext:
    """The certificates that `file` and `folder` of the environment name, or the library's own. Kept until the
    file is another: to read them takes 50 ms, and a split model is many files."""
    return httpx2.create_ssl_context()


def _written_at(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:  # whoever reads it has the error
        return 0


def _blocks(response: httpx2.Response, *, most: int) -> Iterator[bytes]:
    """The body as the network brings it. Raises _TryAgain before more than `most` bytes: one that states no
    length may go on for ever, behind the range and the end of the file."""
    for block in response.iter_raw():
        most -= len(block)
        if most < 0:
            raise _TryAgain("it brings more bytes than were asked for")
        yield block


def _encoded(headers: httpx2.Headers) -> bool:
    return headers.get("content-encoding", "identity").lower() != "identity"


def _origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or {"https": 443, "http": 80}.get(parts.scheme)


def _linked(headers: httpx2.Headers) -> tuple[str, int, str]:
    """What a hub says of the file that it redirects to: (content tag, size, commit), or empty ones."""
    tag = headers.get("x-linked-etag", "").removeprefix("W/").strip('"')
    size = headers.get("x-linked-size", "")
    commit = headers.get("x-repo-commit", "")
    return (
        tag,
        int(size) if re.fullmatch(r"\d{1,18}", size) else 0,
        commit if re.fullmatch(r"[0-9a-f]{40}", commit) else "",
    )


def _retry_after(text: str) -> float:
    """Seconds, of a number or a date (RFC 9110, section 10.2.3); 0 for anything else."""
    if re.fullmatch(r"\d{1,6}", text):
        return float(text)
    try:
        return max(parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
    except (ValueError, OverflowError):
        return 0.0


def _root(error: BaseException) -> BaseException:
    """The innermost cause: libraries wrap what the system said."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return error
