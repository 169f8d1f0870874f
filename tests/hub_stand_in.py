"""A stand-in for the Hub's HTTP interface, as much of it as its client uses here, on the loopback address."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKENS = {"writer": "someone", "stranger": "nobody"}  # token to user; "reader" may read only


@dataclass
class Repo:
    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, bytes], message: str) -> str:
        before = self.commits.get(self.branches.get(branch, ""), {})
        oid = hashlib.sha1(f"{len(self.commits)} {message}".encode()).hexdigest()
        self.commits[oid] = {**before, **files}
        self.branches[branch] = oid
        self.messages.append(message)
        return oid


class Hub(ThreadingHTTPServer):
    """Users write under their own name only, and log in with a token; large files go through the LFS protocol."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.answers = 0  # a status with which every request is refused, for a hub in trouble
        self.address = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> Hub:
        threading.Thread(target=lambda: self.serve_forever(0.01), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()


@contextmanager
def served(monkeypatch: Any, cache: Path, token: str | None = "writer") -> Iterator[Hub]:
    """A Hub that the client of this process talks to, with an empty cache, and logged in with a token or not."""
    from huggingface_hub import constants

    with Hub() as hub, monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # its compiled client wants a storage service
        patch.setattr(constants, "ENDPOINT", hub.address)
        patch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no token"))
        patch.delenv("HF_TOKEN", raising=False)
        patch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
        if token is not None:
            patch.setenv("HF_TOKEN", token)
        yield hub


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: object) -> None:
        pass

    def answer(self, status: int, body: bytes | dict | list = b"", **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.close_connection = True  # or a kept connection would still be served when the Hub is gone
        self.send_response(status)
        sizes = {} if "Content-Length" in headers else {"Content-Length": str(len(data))}
        for name, value in {**sizes, "Connection": "close", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    @property
    def user(self) -> str | None:
        return TOKENS.get((self.headers.get("Authorization") or "").removeprefix("Bearer "))

    def handle_all(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(length)
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        if self.server.answers:
            return self.answer(self.server.answers, {"error": "refused"})
        for method, pattern, act in ROUTES:
            found = re.fullmatch(pattern, path)
            if method == self.command and found:
                return act(self, body, *found.groups())
        return self.answer(404, {"error": "no such route"})

    do_GET = do_HEAD = do_POST = do_PUT = handle_all

    def readable(self, name: str) -> Repo | None:
        """A repository that the user can see; otherwise the Hub answers as if it were not there."""
        repo = self.server.repos.get(name)
        if repo is None or (repo.private and self.user != name.split("/")[0]):
            self.answer(404 if self.user else 401, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
            return None
        return repo

    def writable(self, name: str) -> Repo | None:
        repo = self.readable(name)
        if repo is not None and self.user != name.split("/")[0]:
            self.answer(403, {"error": "forbidden"}, X_Error_Message="You do not have write rights")
            return None
        return repo

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        if self.user is None:
            return self.answer(401, X_Error_Message="Invalid credentials in Authorization header")
        name = f"{asked.get('organization') or self.user}/{asked['name']}"
        if name.split("/")[0] != self.user:
            return self.answer(403, {"error": "forbidden"}, X_Error_Message="You do not have write rights")
        if name in self.server.repos:
            return self.answer(409, {"url": f"{self.server.address}/{name}"})
        repo = Repo(private=asked.get("private") is True or asked.get("visibility") == "private")
        repo.commit("main", {".gitattributes": b""}, "initial commit")
        self.server.repos[name] = repo
        return self.answer(200, {"url": f"{self.server.address}/{name}"})

    def branch(self, body: bytes, name: str, branch: str) -> None:
        repo = self.writable(name)
        if repo is None:
            return None
        if branch in repo.branches:
            return self.answer(409, {"error": "exists"})
        repo.branches[branch] = repo.branches["main"]
        return self.answer(200, {})

    def preupload(self, body: bytes, name: str, revision: str) -> None:
        if self.writable(name) is None:
            return
        files = [
            {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular",
             "shouldIgnore": False, "oid": None}
            for f in json.loads(body)["files"]
        ]  # fmt: skip
        self.answer(200, {"files": files})

    def batch(self, body: bytes, name: str) -> None:
        if self.writable(name) is None:
            return
        objects = [
            {**o, "actions": {"upload": {"href": f"{self.server.address}/lfs/{o['oid']}"}}}
            for o in json.loads(body)["objects"]
        ]
        self.answer(200, {"transfer": "basic", "objects": objects})

    def blob(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            return self.answer(422, {"error": "hash"})
        self.server.blobs[oid] = body
        return self.answer(200)

    def commit(self, body: bytes, name: str, revision: str) -> None:
        repo = self.writable(name)
        if repo is None:
            return None
        if revision not in repo.branches:
            return self.answer(404, X_Error_Code="RevisionNotFound", X_Error_Message="Invalid rev id")
        message, files = "", {}
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                files[value["path"]] = self.server.blobs[value["oid"]]
        oid = repo.commit(revision, files, message)
        url = f"{self.server.address}/{name}/commit/{oid}"
        return self.answer(200, {"commitUrl": url, "commitOid": oid, "success": True})

    def info(self, body: bytes, name: str) -> None:
        repo = self.readable(name)
        if repo is not None:
            self.answer(200, {"id": name, "sha": repo.branches["main"], "private": repo.private, "siblings": []})

    def resolve(self, body: bytes, name: str, revision: str, file: str) -> None:
        repo = self.readable(name)
        if repo is None:
            return None
        oid = repo.branches.get(revision, revision)
        if oid not in repo.commits:
            return self.answer(404, X_Error_Code="RevisionNotFound", X_Error_Message="Invalid rev id")
        if file not in repo.commits[oid]:
            return self.answer(404, X_Error_Code="EntryNotFound", X_Error_Message="no entry", X_Repo_Commit=oid)
        data = repo.commits[oid][file]
        return self.answer(200, data, ETag=f'"{hashlib.sha256(data).hexdigest()}"', X_Repo_Commit=oid)

    def valid(self, body: bytes) -> None:
        assert json.loads(body)["content"].startswith("---\n")
        self.answer(200, {"errors": [], "warnings": []})


NAME = r"([^/]+/[^/]+)"
ROUTES = [
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.valid),
    ("POST", rf"/api/models/{NAME}/branch/(.+)", Handler.branch),
    ("POST", rf"/api/models/{NAME}/preupload/(.+)", Handler.preupload),
    ("POST", rf"/api/models/{NAME}/commit/(.+)", Handler.commit),
    ("GET", rf"/api/models/{NAME}", Handler.info),
    ("POST", rf"/{NAME}\.git/info/lfs/objects/batch", Handler.batch),
    ("PUT", r"/lfs/([0-9a-f]+)", Handler.blob),
    ("GET", rf"/{NAME}/resolve/([^/]+)/(.+)", Handler.resolve),
    ("HEAD", rf"/{NAME}/resolve/([^/]+)/(.+)", Handler.resolve),
]
