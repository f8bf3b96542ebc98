"""HTTP servers for tests: nginx, whose access log counts what was really sent, and one that misbehaves.

Not tests themselves. Ports come from the kernel, everything lives in a folder of the test's.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

CONFIGURATION = """
{user}
worker_processes 1;
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
events {{ worker_connections 64; }}
http {{
  log_format bytes '$status $body_bytes_sent $uri $http_range';
  access_log {folder}/access.log bytes;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  sendfile on;
  server {{
    listen 127.0.0.1:{port} {listen};
    root {root};
    {extra}
  }}
}}
"""


def nginx_command() -> str:
    found = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    if found is None:
        pytest.fail("nginx is missing: run scripts/setup, or apt-get install nginx-light")
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Sent:
    status: int
    body: int
    path: str
    range: str


class Nginx:
    """Serves the folder `root` at `url` until `stop`."""

    def __init__(self, root: Path, folder: Path, *, extra: str = "", listen: str = "") -> None:
        self.folder = folder
        for attempt in range(3):  # somebody else may take the port in between
            self.port = free_port()
            user = "user root;" if os.geteuid() == 0 else ""
            text = CONFIGURATION.format(
                user=user, folder=folder, root=root, port=self.port, extra=extra, listen=listen
            )
            (folder / "nginx.conf").write_text(text)
            self._process = subprocess.Popen(
                [nginx_command(), "-p", str(folder), "-c", str(folder / "nginx.conf")],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            if self._answers():
                break
            said = self._process.communicate()[1].decode()
            assert attempt < 2, f"nginx does not start: {said}"
        self.url = f"http{'s' if listen == 'ssl' else ''}://127.0.0.1:{self.port}"

    def _answers(self) -> bool:
        until = time.monotonic() + 10
        while time.monotonic() < until and self._process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                time.sleep(0.01)
            else:
                return True
        return False

    def sent(self) -> list[Sent]:
        """What the access log has so far."""
        lines = (self.folder / "access.log").read_text().splitlines()
        found = [re.fullmatch(r"(\d+) (\d+) (\S+) (.*)", line) for line in lines]
        return [Sent(int(m[1]), int(m[2]), m[3], m[4]) for m in found if m is not None]

    def stop(self) -> None:
        """Waits for the last lines of the log. Idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(5)
        if self._process.stderr is not None:
            self._process.stderr.close()


@dataclass
class Behaviour:
    """What the misbehaving server does; a test changes it while the server runs."""

    content: bytes = b""
    etag: str | None = '"one"'
    ranges: bool = True
    status: int = 200  # anything else is answered at once
    answers: list[int] = field(default_factory=list)  # statuses of the next requests, before all else
    headers: dict[str, str] = field(default_factory=dict)
    cut_after: int | None = None  # bytes of a body, then the connection goes
    drip: bool = False  # a byte at a time
    most: int | None = None  # bytes that a range is answered with at most
    lie: Callable[[int, int], tuple[int, int, int]] | None = None  # what Content-Range says
    longer: int = 0  # bytes that Content-Length says too many
    endless: bool = False  # says no length, and goes on behind the range until nobody reads any more
    location: str | None = None
    hold: threading.Event | None = None  # waited for after half of the body
    held: threading.Event = field(default_factory=threading.Event)
    before: Callable[[BaseHTTPRequestHandler], object] | None = None  # may return what to do instead


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Misbehaving)
        now = server.behaviour
        server.requests.append((self.path, dict(self.headers)))
        if now.before is not None:
            instead = now.before(self)
            now = instead if isinstance(instead, Behaviour) else now
        if now.answers:
            status = now.answers.pop(0)
            if status != 200:
                self.answer(status, now.headers)
                return
        if now.status != 200:
            self.answer(now.status, now.headers)
            return
        if now.location is not None:
            self.answer(302, {"Location": now.location, **now.headers})
            return
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        size = len(now.content)
        start, end = (int(asked[1]), int(asked[2]) + 1) if asked and now.ranges else (0, size)
        if start >= size:
            self.answer(416, {"Content-Range": f"bytes */{size}"})
            return
        end = min(end, size, start + now.most if now.most else size)
        self.send_response(206 if asked and now.ranges else 200)
        first, last, total = now.lie(start, end) if now.lie else (start, end - 1, size)
        if asked and now.ranges:
            self.send_header("Content-Range", f"bytes {first}-{last}/{total}")
        if now.etag is not None:
            self.send_header("ETag", now.etag)
        for name, value in now.headers.items():
            self.send_header(name, value)
        if now.endless:
            self.endless_body(now.content[start:end])
            return
        self.send_header("Content-Length", str(end - start + now.longer))
        self.end_headers()
        self.body(now, now.content[start:end])

    def answer(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def endless_body(self, content: bytes) -> None:
        server = self.server
        assert isinstance(server, Misbehaving)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.close_connection = True
        while not server.stopped.is_set():
            self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))
            server.sent += len(content)

    def body(self, now: Behaviour, content: bytes) -> None:
        server = self.server
        assert isinstance(server, Misbehaving)
        if now.longer or (now.cut_after is not None and now.cut_after < len(content)):
            content = content[: now.cut_after]
            self.close_connection = True
        if now.hold is not None:
            self.wfile.write(content[: len(content) // 2])
            now.held.set()
            now.hold.wait(60)
            content = content[len(content) // 2 :]
        if not now.drip:
            self.wfile.write(content)
            server.sent += len(content)
            return
        for byte in content:
            self.wfile.write(bytes([byte]))
            if server.stopped.wait(0.05):
                return


class Misbehaving(ThreadingHTTPServer):
    """One file under every path, served as `behaviour` says; `requests` has (path, headers) of each."""

    daemon_threads = True

    def __init__(self, content: bytes = b"") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviour = Behaviour(content)
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.sent = 0
        self.stopped = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self._thread.start()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is no news here."""

    def stop(self) -> None:
        self.stopped.set()
        if self.behaviour.hold is not None:
            self.behaviour.hold.set()
        self.shutdown()
        self._thread.join(5)
        self.server_close()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
