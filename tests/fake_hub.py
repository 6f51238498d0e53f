"""The Hugging Face Hub on this machine: a dataset's files, and faults on request."""

import hashlib
import http.server
import json
import threading
import urllib.parse
from collections.abc import Mapping

COMMIT = "c0ffee" + "0" * 34


class FakeHub(http.server.ThreadingHTTPServer):
    """Serves `files` (path: bytes) as the dataset `name`, while entered.

    Attributes:
      down: requests are not answered; after "/down".
    """

    daemon_threads = True

    def __init__(self, name: str, files: Mapping[str, bytes]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name, self.files = name, dict(files)
        self.down = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> "FakeHub":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def entry(self, path: str) -> dict:
        if path in self.files:
            data = self.files[path]
            return {"type": "file", "path": path, "size": len(data), "oid": _oid(data)}
        return {"type": "directory", "path": path, "size": 0, "oid": "0" * 40}


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        hub, url = self.server, urllib.parse.urlparse(self.path)
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if hub.down:
            self.close_connection = True
            return
        if url.path == "/down":
            hub.down = True
            self._send(200, b"", {})
            return
        api, files = f"/api/datasets/{hub.name}", f"/datasets/{hub.name}/resolve/{COMMIT}/"
        path = urllib.parse.unquote(url.path)
        if path in (api, f"{api}/revision/{COMMIT}"):
            names = [{"rfilename": name} for name in hub.files]
            about = {"_id": "1", "id": hub.name, "sha": COMMIT, "siblings": names, "tags": []}
            flags = dict.fromkeys(("private", "gated", "disabled"), False)
            self._json(about | flags | {"downloads": 0, "likes": 0})
        elif path == f"{api}/tree/{COMMIT}":
            self._json([hub.entry(name.partition("/")[0]) for name in list(hub.files)[:1]])
        elif path.startswith(f"{api}/tree/{COMMIT}/"):
            self._json([hub.entry(name) for name in hub.files])
        elif path.startswith(files) and path.removeprefix(files) in hub.files:
            self._file(hub.files[path.removeprefix(files)])
        else:
            known = path.startswith(files)
            code = "EntryNotFound" if known else "RepoNotFound"
            self._send(404, b"{}", {"X-Error-Code": code})

    do_HEAD = do_POST = do_GET

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _file(self, data: bytes) -> None:
        headers = {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        asked = self.headers.get("Range")
        if asked is None:
            return self._send(200, data, headers)
        first, last = asked.removeprefix("bytes=").split("-")
        begin, end = int(first), min(int(last or len(data) - 1), len(data) - 1)
        headers["Content-Range"] = f"bytes {begin}-{end}/{len(data)}"
        return self._send(206, data[begin : end + 1], headers)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
