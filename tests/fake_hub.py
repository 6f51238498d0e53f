"""The Hugging Face Hub on this machine: a dataset's files, and faults on request."""

import contextlib
import hashlib
import http.server
import json
import threading
import urllib.parse
from collections.abc import Iterator, Mapping

COMMIT = "c0ffee" + "0" * 34


@contextlib.contextmanager
def hub_of(dataset: str, files: Mapping[str, bytes]) -> Iterator[str]:
    """The address that serves `files` (path: bytes), all in one folder. After "/down" requests
    are not answered."""
    api, place = f"/api/datasets/{dataset}", f"/datasets/{dataset}/resolve/{COMMIT}/"
    tree, folder = f"{api}/tree/{COMMIT}", next(iter(files)).partition("/")[0]
    sums = {name: hashlib.sha1(data).hexdigest() for name, data in files.items()}
    about = {"_id": "1", "id": dataset, "sha": COMMIT, "tags": [], "downloads": 0, "likes": 0}
    about |= {"siblings": [{"rfilename": name} for name in files]}
    about |= dict.fromkeys(("private", "gated", "disabled"), False)
    answers = {
        "/down": {},
        api: about,
        f"{api}/revision/{COMMIT}": about,
        tree: [{"type": "directory", "path": folder, "size": 0, "oid": "0" * 40}],
        f"{tree}/{folder}": [
            {"type": "file", "path": name, "size": len(data), "oid": sums[name]}
            for name, data in files.items()
        ],
    }

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version, down = "HTTP/1.1", False

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            path = urllib.parse.unquote(urllib.parse.urlparse(self.path).path)
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if Handler.down:
                self.close_connection = True
                return
            Handler.down = path == "/down"
            status, headers, data = 200, {}, files.get(path.removeprefix(place))
            if path in answers:
                body, headers["Content-Type"] = json.dumps(answers[path]), "application/json"
                data = body.encode()
            elif data is None:
                status, data = 404, b"{}"
                known = "Entry" if path.startswith(place) else "Repo"
                headers["X-Error-Code"] = f"{known}NotFound"
            else:
                headers["ETag"] = f'"{sums[path.removeprefix(place)]}"'
                headers["X-Repo-Commit"] = COMMIT
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(data))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_HEAD = do_POST = do_GET

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with server:
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
