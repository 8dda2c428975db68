"""A local Hugging Face hub on 127.0.0.1 with the endpoints that huggingface_hub uses: info, trees, files by byte ranges."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class Hub:
    """Models by name, with a folder for each revision. `asked` lists the requests so far. If `break_after` is set, the next
    response with more bytes is cut off there.
    """

    models: dict[str, dict[str, Path]]
    asked: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    break_after: int | None = None
    url: str = ""

    def sha(self, name: str, revision: str) -> str:
        """The commit hash of a revision."""
        return hashlib.sha1(f"{name}@{revision}".encode()).hexdigest()

    def folder(self, name: str, revision: str) -> tuple[Path, str] | None:
        """(folder, commit) of a revision or commit; None if unknown."""
        for known, folder in self.models.get(name, {}).items():
            if revision in (known, self.sha(name, known)):
                return folder, self.sha(name, known)
        return None


@contextlib.contextmanager
def served(models: dict[str, dict[str, Path]]) -> Iterator[Hub]:
    """Runs a hub in threads of this process."""
    hub = Hub(models)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append(f"{self.command} {path}")
            if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)", path):
                self._api(*found.groups())
            elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self._file(*found.groups(), body)
            else:
                self._refused(404, "EntryNotFound")

        def _api(self, name: str, what: str, revision: str) -> None:
            if name not in hub.models:
                return self._refused(401 if name.startswith("private/") else 404, "RepoNotFound")
            if name.startswith("gated/"):
                return self._refused(403, "GatedRepo")
            place = hub.folder(name, revision)
            if place is None:
                return self._refused(404, "RevisionNotFound")
            files = sorted(path for path in place[0].rglob("*") if path.is_file())
            if what == "tree":
                rows = [
                    {"type": "file", "path": str(p.relative_to(place[0])), "size": p.stat().st_size, "oid": _oid(p)}
                    for p in files
                ]
                return self._json(rows)
            siblings = [{"rfilename": str(path.relative_to(place[0]))} for path in files]
            return self._json(
                {"id": name, "modelId": name, "sha": place[1], "siblings": siblings, "private": False, "tags": []}
            )

        def _file(self, name: str, revision: str, path: str, body: bool) -> None:
            place = hub.folder(name, revision)
            if place is None or not (place[0] / path).is_file():
                return self._refused(404, "EntryNotFound")
            content = (place[0] / path).read_bytes()
            start = 0
            if wanted := self.headers.get("Range"):
                hub.ranges.append(f"{path} {wanted}")
                start = int(wanted.removeprefix("bytes=").split("-")[0])
            self.send_response(206 if wanted else 200)
            self.send_header("ETag", f'"{_oid(place[0] / path)}"')
            self.send_header("X-Repo-Commit", place[1])
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(len(content) - start))
            if wanted:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.end_headers()
            if not body:
                return
            if hub.break_after is not None and len(content) - start > hub.break_after:
                self.wfile.write(content[start : start + hub.break_after])
                hub.break_after = None
                self.close_connection = True
                self.connection.close()
                return
            self.wfile.write(content[start:])

        def _json(self, value: object) -> None:
            content = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _refused(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _oid(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
