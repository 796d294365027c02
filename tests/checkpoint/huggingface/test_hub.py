"""`hf:NAME`, against a hub on this machine: what is downloaded, again, and where the connection breaks."""

import hashlib
import json
import os
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

REVISION = "0123456789abcdef0123456789abcdef01234567"
BREAK = 17 * 2**20
"""After how many bytes a connection breaks: the client keeps pieces of 10 MiB."""
FIND = "import sys; from axon.checkpoint.huggingface.hub import model_folder; print(model_folder(sys.argv[1]))"


class Hub(BaseHTTPRequestHandler):
    """One model; `server.files` has its files by name, `server.asked` what was asked for, with its range of bytes."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        files = self.server.files
        self.server.asked.append((self.command, Path(self.path).name, self.headers.get("Range")))
        if self.path.startswith("/owner/model/resolve/"):
            self._file(files[Path(self.path).name], int((self.headers.get("Range") or "bytes=0-")[6:].split("-")[0]))
        elif self.path.startswith(f"/api/models/owner/model/tree/{REVISION}"):
            self._json([{"type": "file", "path": name, "size": len(x), "oid": etag(x)} for name, x in files.items()])
        elif self.path.startswith("/api/models/owner/model"):
            self._json({"id": "owner/model", "sha": REVISION, "siblings": [{"rfilename": name} for name in files]})
        else:
            self._json({"error": "no such model"}, 404)

    def _json(self, value, status=200):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, content, start):
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{etag(content)}"')
        self.send_header("X-Repo-Commit", REVISION)
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "GET":
            part = content[start : start + BREAK]
            self.wfile.write(part)
            self.close_connection = start + len(part) < len(content)

    def log_message(self, format, *args):
        pass


def etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture
def hub(rng):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []
    server.files = {
        "config.json": b"{}",
        "model.safetensors": rng.bytes(BREAK + 2**20),
        "pytorch_model.bin": b"of torch",
        "tokenizer.json": b"{}",
    }
    Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.server_close()


@pytest.fixture
def find(hub, tmp_path):
    """find(name): a process that looks for a model; its folder where it found one, and what it said."""
    own = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path / "cache")}

    def run(name):
        command = [sys.executable, "-c", FIND, name]
        done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=100)
        return Path(done.stdout.strip()) if done.returncode == 0 else None, done.stderr

    return run


@pytest.mark.full
def test_a_model_is_downloaded_once_and_what_is_there_when_the_connection_breaks_is_kept(hub, find):
    folder, said = find("hf:owner/model")
    assert folder is not None, said
    wanted = hub.files.keys() - {"pytorch_model.bin"}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {name: hub.files[name] for name in wanted}
    ranges = [part for kind, name, part in hub.asked if (kind, name) == ("GET", "model.safetensors")]
    assert ranges[0] is None
    assert all(re.fullmatch(r"bytes=[1-9]\d*-", part) for part in ranges[1:])
    assert len(ranges) > 1
    assert "100%" in said  # its progress
    hub.asked.clear()
    assert find("hf:owner/model")[0] == folder
    assert not [name for kind, name, _ in hub.asked if kind == "GET" and name in hub.files]
    hub.shutdown()
    hub.server_close()
    assert find("hf:owner/model")[0] == folder  # without a network
    folder, said = find("hf:owner/other")
    assert folder is None
    assert "hf:owner/other is no folder, and cannot be downloaded: " in said
