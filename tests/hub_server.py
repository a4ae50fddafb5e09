"""A stand-in for the hub on the loopback: the endpoints that huggingface_hub calls to download and to upload models.

Repositories are kept in memory, with their commits. What huggingface_hub relies on is answered as the hub does: commits
and etags in headers, large files behind a redirect, ranges, error codes in X-Error-Code, LFS objects that are stored
only if their SHA-256 is the one announced. `seen` lists every request.
"""

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
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

LARGE = (".safetensors", ".bin", ".gguf")
TOKEN = "hf_of_the_stand_in"


def _sha1(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@dataclass
class Repo:
    """A repository: the files of each commit, and which commit a branch or tag is."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    messages: list[str] = field(default_factory=list)

    def commit(self, files: dict[str, bytes], ref: str = "main", message: str = "") -> str:
        content = b"".join(name.encode() + data for name, data in sorted(files.items()))
        oid = _sha1(content + str(len(self.commits)).encode())
        self.commits[oid], self.refs[ref] = files, oid
        self.messages.append(message)
        return oid

    def find(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.refs.get(revision)

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[self.refs["main"]]


class Hub:
    """The stand-in: `repos` by name, `url` to set as HF_ENDPOINT, `seen` requests as "GET /path"."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.seen: list[str] = []
        self.agents: set[str] = set()
        self.broken: str | None = None  # requests that match it are answered with 403

    def add(self, name: str, folder: Path, *, but: tuple[str, ...] = (), **more: Any) -> Repo:
        """A repository with the files of a folder."""
        files = {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}
        repo = self.repos[name] = Repo(**more)
        repo.commit({path: data for path, data in files.items() if path not in but})
        return repo

    def fetched(self) -> set[str]:
        """The files that were asked for by name; the content of large ones then comes from elsewhere."""
        return {unquote(line.partition("/resolve/")[2].partition("/")[2]) for line in self.seen if "/resolve/" in line}

    @contextmanager
    def serving(self) -> Iterator[Hub]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        # Large files come from a host of another name, as on the hub: huggingface_hub sends no token there.
        self.store = f"http://localhost:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _Refusal(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        self.status, self.code, self.message = status, code, message


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        return None

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_HEAD(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def do_PUT(self) -> None:
        self._answer(self._put)

    def _answer(self, how: Any) -> None:
        self.hub.seen.append(f"{self.command} {self.path}")
        self.hub.agents.add(self.headers.get("user-agent", "").split("/")[0])
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            if self.hub.broken and re.search(self.hub.broken, self.path):
                raise _Refusal(403, "", "out of order")
            how(urlsplit(self.path))
        except _Refusal as refusal:
            headers = {"X-Error-Code": refusal.code, "X-Error-Message": refusal.message}
            self._send(refusal.status, json.dumps({"error": refusal.message}).encode(), **headers)

    # ------------------------------------------------------------- what is there

    def _logged_in(self) -> bool:
        return self.headers.get("authorization") == f"Bearer {TOKEN}"

    def _repo(self, name: str) -> Repo:
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and not self._logged_in()):
            raise _Refusal(401, "RepoNotFound", "Repository not found")
        return repo

    def _files(self, name: str, revision: str) -> tuple[str, dict[str, bytes]]:
        repo = self._repo(name)
        commit = repo.find(unquote(revision))
        if commit is None:
            raise _Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, repo.commits[commit]

    def _get(self, url: Any) -> None:
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", url.path):
            commit, files = self._files(match[1], match[2] or "main")
            blobs = "blobs" in parse_qs(url.query)
            siblings = [{"rfilename": n, **(_entry(n, d, "blobId") if blobs else {})} for n, d in files.items()]
            repo = self.hub.repos[match[1]]
            gated = "auto" if repo.gated else False
            self._json({"id": match[1], "sha": commit, "siblings": siblings, "private": repo.private, "gated": gated})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", url.path):
            _, files = self._files(match[1], match[2])
            self._json([{"type": "file", "path": name, **_entry(name, data, "oid")} for name, data in files.items()])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", url.path):
            self._resolve(match[1], match[2], unquote(match[3]))
        elif match := re.fullmatch(r"/objects/([0-9a-f]{64})", url.path):
            self._send(200, self.hub.objects[match[1]], ETag=f'"{match[1]}"')
        elif url.path == "/api/whoami-v2":
            if not self._logged_in():
                raise _Refusal(401, "", "Invalid credentials in Authorization header")
            self._json({"type": "user", "name": "me", "orgs": []})
        else:
            raise _Refusal(404, "", f"no such page: {url.path}")

    def _resolve(self, name: str, revision: str, path: str) -> None:
        repo = self._repo(name)
        if repo.gated and not self._logged_in():
            raise _Refusal(401, "GatedRepo", "Access to this model is restricted")
        commit, files = self._files(name, revision)
        if path not in files:
            raise _Refusal(404, "EntryNotFound", "Entry not found")
        data = files[path]
        if not path.endswith(LARGE):
            self._send(200, data, **{"X-Repo-Commit": commit, "ETag": f'"{_sha1(data)}"'})
            return
        oid = hashlib.sha256(data).hexdigest()
        self.hub.objects[oid] = data
        linked = {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(data)), "X-Repo-Commit": commit}
        self._send(302, b"", Location=f"{self.hub.store}/objects/{oid}", **linked)

    # ------------------------------------------------------------- what is brought

    def _post(self, url: Any) -> None:
        if not self._logged_in():
            raise _Refusal(401, "", "Invalid credentials in Authorization header")
        if url.path == "/api/repos/create":
            self._create(json.loads(self.body))
        elif url.path == "/api/validate-yaml":
            self._validate(json.loads(self.body)["content"])
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", url.path):
            self._repo(match[1])
            files = [
                {
                    "path": f["path"],
                    "uploadMode": "lfs" if f["path"].endswith(LARGE) else "regular",
                    "shouldIgnore": False,
                }
                for f in json.loads(self.body)["files"]
            ]
            self._json({"files": files})
        elif match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", url.path):
            self._repo(match[1])
            objects = [self._upload_action(wanted) for wanted in json.loads(self.body)["objects"]]
            self._json({"transfer": "basic", "objects": objects})
        elif url.path == "/verify":
            asked = json.loads(self.body)
            if len(self.hub.objects.get(asked["oid"], b"")) != asked["size"]:
                raise _Refusal(404, "", "no such object")
            self._json({})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", url.path):
            self._commit(match[1])
        else:
            raise _Refusal(404, "", f"no such page: {url.path}")

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.hub.repos:
            self._send(409, json.dumps({"error": "exists", "url": f"{self.hub.url}/{name}"}).encode())
            return
        if asked["organization"] == "others":
            raise _Refusal(403, "", "You don't have the rights to create a model under the namespace others")
        repo = self.hub.repos[name] = Repo(private=asked.get("visibility") == "private" or asked.get("private", False))
        repo.commit({".gitattributes": b""})
        self._json({"url": f"{self.hub.url}/{name}", "id": name})

    def _validate(self, card: str) -> None:
        """The hub refuses a card whose head is not YAML, or whose base_model is no id."""
        head = yaml.safe_load(card.split("---\n")[1])
        base = head.get("base_model")
        if base is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", base):
            message = f'"base_model" with value "{base}" is not valid. Use a model id from https://hf.co/models.'
            self._send(400, json.dumps({"errors": [{"message": message}], "warnings": []}).encode())
            return
        self._json({"errors": [], "warnings": []})

    def _upload_action(self, wanted: dict[str, Any]) -> dict[str, Any]:
        if wanted["oid"] in self.hub.objects:
            return wanted
        upload = {"href": f"{self.hub.store}/objects/{wanted['oid']}"}
        return {**wanted, "actions": {"upload": upload, "verify": {"href": f"{self.hub.url}/verify"}}}

    def _put(self, url: Any) -> None:
        oid = url.path.rpartition("/")[2]
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise _Refusal(400, "", "the content has another SHA-256")
        self.hub.objects[oid] = self.body
        self._send(200, b"")

    def _commit(self, name: str) -> None:
        repo = self._repo(name)
        files = dict(repo.files)
        summary = ""
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                summary = value["summary"]
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            else:
                raise _Refusal(400, "", f"unknown operation {entry['key']}")
        oid = repo.commit(files, message=summary)
        self._json({"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{name}/commit/{oid}"})

    # ------------------------------------------------------------- answers

    def _json(self, content: Any) -> None:
        self._send(200, json.dumps(content).encode(), **{"Content-Type": "application/json"})

    def _send(self, status: int, data: bytes, **headers: str) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked and status == 200:
            start, stop = int(asked[1]), int(asked[2] or len(data) - 1) + 1
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            status, data = 206, data[start:stop]
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _entry(name: str, data: bytes, oid: str) -> dict[str, Any]:
    large = {"lfs": {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}}
    if oid == "blobId" and name.endswith(LARGE):
        large["lfs"]["sha256"] = large["lfs"]["oid"]
    return {"size": len(data), oid: _sha1(data), **(large if name.endswith(LARGE) else {})}
