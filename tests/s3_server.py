"""A real S3 API on loopback, by moto, in a process of its own; it can be told to fail.

Run as a program it prints its port, and ends with its standard input. Requests are noted. `Server`
is a test's way to it.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

BUCKET = "bucket"
ANYONE = "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request, Signature=0"


class Middleware:
    """Notes requests, and answers some of them in its own way."""

    def __init__(self, application):
        self.application = application
        self.requests = []
        self.faults = []
        self.seen = 0

    def __call__(self, environ, start_response):
        if environ["PATH_INFO"] == "/~control":
            return self.control(environ, start_response)
        line = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}"
        line += f" {environ.get('HTTP_RANGE', '')}?{environ['QUERY_STRING']}"
        self.requests.append(line)
        for fault in self.faults:
            if fault["match"] in line and fault["skip"] <= 0 < fault["times"]:
                fault["times"] -= 1
                return self.fail(fault, environ, start_response)
            fault["skip"] -= fault["match"] in line
        if environ["REQUEST_METHOD"] == "GET":  # as for https://: everyone may read
            environ.setdefault("HTTP_AUTHORIZATION", ANYONE)
        return self.application(environ, start_response)

    def control(self, environ, start_response):
        content = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        answer = json.dumps(self.requests).encode()
        self.requests, self.faults = [], json.loads(content or "[]")
        start_response("200 OK", [("Content-Length", str(len(answer)))])
        return [answer]

    def fail(self, fault, environ, start_response):
        kind = fault["kind"]
        if kind == "slow":
            time.sleep(fault["seconds"])
            return self.application(environ, start_response)
        if kind in ("lost", "cut"):  # the connection, after or before it is done
            if kind == "lost":
                list(self.application(environ, lambda *_: lambda _: None))
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        body = (
            f"<Error><Code>{fault['code']}</Code><Message>told to fail</Message></Error>".encode()
        )
        start_response(f"{kind} Told", [("Content-Length", str(len(body)))])
        return [body]


class Server:
    """The server, and the environment variables that lead to it."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.s3_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=Path(__file__).resolve().parent.parent,
        )
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"
        self.environment = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }

    def control(self, faults=()):
        content = json.dumps(list(faults)).encode()
        with urllib.request.urlopen(f"{self.url}/~control", content) as answer:
            return json.loads(answer.read())

    def requests(self):
        """Return the requests since this was last asked, and stop failing."""
        return self.control()

    def fail(self, kind, match="", *, times=1, skip=0, code="Told", seconds=0):
        """Fail, or be slow, the next times that a request holds this text, after some."""
        told = {"kind": kind, "match": match, "times": times, "skip": skip, "code": code}
        self.control([told | {"seconds": seconds}])

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def main():
    import logging
    import threading

    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from moto.s3.models import s3_backends
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    s3_backends["123456789012"]["aws"].create_bucket(BUCKET, "us-east-1")
    application = Middleware(DomainDispatcherApplication(create_backend_app))
    server = make_server(
        "127.0.0.1", 0, application, threaded=True, request_handler=MotoRequestHandler
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
