"""A fake wandb service: accepts everything and records the lines of runs."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BUCKET = {
    "id": "run",
    "displayName": "run",
    "historyLineCount": 0,
    "project": {"id": "p", "name": "tokenmixup", "entity": {"id": "e", "name": "somebody"}},
}


class Service(ThreadingHTTPServer):
    """Listens on a free port; answers a new run with `status`."""

    def __init__(self, status: int = 200):
        super().__init__(("127.0.0.1", 0), Answer)
        self.status = status
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests: list[str] = []
        self.lines: dict[str, list[dict[str, Any]]] = {}  # run id -> lines

    def stop(self) -> None:
        """Stops the service; later connections are refused."""
        self.shutdown()
        self.server_close()


class Answer(BaseHTTPRequestHandler):
    server: Service
    protocol_version = "HTTP/1.0"  # closes the connection after each answer

    def log_message(self, *args: Any) -> None:
        """Logs nothing."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append(f"{self.path} {body.decode(errors='replace')}")
        if self.path.endswith("/file_stream"):
            sent = json.loads(body).get("files", {}).get("wandb-history.jsonl", {})
            lines = self.server.lines.setdefault(self.path.split("/")[-2], [])
            lines += [json.loads(line) for line in sent.get("content", [])]
        request: dict[str, Any] = {}
        if self.path == "/graphql":
            request = json.loads(body)
        query = request.get("query", "")
        status = 200
        if "bucket" in query.lower():  # a new run
            status = self.server.status
        self._send(status, self._data(query, request))

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append(f"{self.path} {body.decode(errors='replace')}")
        self._send(200, {})

    def _data(self, query: str, request: dict[str, Any]) -> dict[str, Any]:
        if "upsertBucket" in query:
            bucket = {**BUCKET, "name": request["variables"]["name"]}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if "createRunFiles" in query:
            files = [
                {"name": name, "uploadUrl": f"{self.server.url}/{name}"}
                for name in request["variables"]["files"]
            ]
            return {"createRunFiles": {"runID": "run", "uploadHeaders": [], "files": files}}
        return {"viewer": {"id": "v", "entity": "somebody", "username": "somebody", "flags": "{}"}}

    def _send(self, status: int, data: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"data": data, "errors": []}
        if status != 200:
            answer["errors"] = [{"message": "not for you"}]
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serving(status: int = 200) -> Iterator[Service]:
    service = Service(status)
    threading.Thread(target=service.serve_forever, daemon=True).start()
    try:
        yield service
    finally:
        service.stop()
