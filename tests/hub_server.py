"""A loopback server that speaks the routes of the Hugging Face Hub that huggingface_hub uses, honestly or not."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Hub:
    """What the server holds: files by `"owner/name"` and path; and how it misbehaves.

    Args:
        repos: files of each repository.
        gated: repositories whose terms were not accepted.
        sizes: sizes that the server claims instead of the real ones, by path.
        cut: bytes that are missing at the end of each download.
        broken: answer everything with this status.
        requests: every request line.
        commits: what was committed.
    """

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    sizes: dict[str, int] = field(default_factory=dict)
    cut: int = 0
    broken: int = 0
    requests: list[str] = field(default_factory=list)
    commits: list[dict[str, Any]] = field(default_factory=list)
    endpoint: str = ""

    def downloads(self) -> list[str]:
        return [line for line in self.requests if line.startswith("GET") and "/resolve/" in line]


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Serve until the block ends, at `hub.endpoint`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def reply(self, status: int, body: bytes = b"", length: int | None = None, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
            if length is not None and length != len(body) and self.command != "HEAD":
                self.close_connection = True

        def json(self, facts: Any, status: int = 200) -> None:
            self.reply(status, json.dumps(facts).encode(), Content_Type="application/json")

        def refuse(self, status: int, code: str) -> None:
            self.reply(status, b"{}", X_Error_Code=code, Content_Type="application/json")

        def do_GET(self) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            path = self.path.partition("?")[0].strip("/")
            if hub.broken:
                return self.reply(hub.broken)
            parts = path.removeprefix("api/models/").split("/")
            repo = "/".join(parts[:2])
            if repo not in hub.repos:
                return self.refuse(404, "RepoNotFound")
            if repo in hub.gated:
                return self.refuse(403, "GatedRepo")
            files, action, revision = hub.repos[repo], *parts[2:4]
            if revision not in ("main", COMMIT):
                return self.refuse(404, "RevisionNotFound")
            if action == "revision":
                return self.json({"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]})
            if action == "tree":
                return self.json(
                    [
                        {
                            "type": "file",
                            "path": name,
                            "size": hub.sizes.get(name, len(data)),
                            "oid": hashlib.sha1(data).hexdigest(),
                        }
                        for name, data in files.items()
                    ]
                )
            name = "/".join(parts[4:])
            if name not in files:
                return self.refuse(404, "EntryNotFound")
            data = files[name]
            claimed = hub.sizes.get(name, len(data))
            headers = {
                "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
                "X_Repo_Commit": COMMIT,
                "Accept_Ranges": "bytes",
            }
            start = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0]
            body = data[int(start) : len(data) - hub.cut]
            return self.reply(206 if int(start) else 200, body, claimed - int(start), **headers)

        do_HEAD = do_GET

        def do_POST(self) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.path.endswith("/repos/create"):
                facts = json.loads(body)
                repo = "/".join(filter(None, [facts.get("organization"), facts["name"]]))
                hub.repos.setdefault(repo, {})
                return self.json({"url": f"{hub.endpoint}/{repo}", "id": repo})
            if "/preupload/" in self.path:
                names = [file["path"] for file in json.loads(body)["files"]]
                return self.json(
                    {"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]}
                )
            if "/commit/" in self.path:
                repo = "/".join(self.path.split("/")[3:5])
                for line in map(json.loads, body.splitlines()):
                    hub.commits.append(line)
                    if line["key"] == "file":
                        hub.repos[repo][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                return self.json(
                    {"success": True, "commitOid": COMMIT, "commitUrl": f"{hub.endpoint}/{repo}/commit/{COMMIT}"}
                )
            return self.json({"warnings": [], "errors": []})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
