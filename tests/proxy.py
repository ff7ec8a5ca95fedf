"""A proxy on loopback in front of an HTTP server, which does to requests and answers what networks do to them."""

import http.client
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SECONDS = 0.5  # of a delay


class Proxy(ThreadingHTTPServer):
    """Forwards each request, with a fault.

    Args:
        port: of the server on this machine.
        fault: called with the number of the request from 1, its method and its path. Returns "": none; "delay"; "503";
            "refuse": closed before the server sees it; "lose": closed after the server has carried it out; "cut":
            closed in the middle of the answer's body; "stale": a list as it was at the last request of it; or a
            function that is called once the server has carried it out.
    """

    daemon_threads = True

    def __init__(self, port: int, fault: Callable[[int, str, str], str | Callable[[], object]]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.port, self.fault, self.count, self.lists = port, fault, 0, {}
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_: object) -> None:
        """A client that has hung up is no error."""

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        proxy = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with proxy.lock:
            proxy.count += 1
            fault = proxy.fault(proxy.count, self.command, self.path)
        if fault == "delay":
            time.sleep(SECONDS)
        if fault == "503":
            return self.reply(503, {}, b"<Error><Code>SlowDown</Code></Error>")
        if fault == "refuse":
            return self.hang_up()
        server = http.client.HTTPConnection("127.0.0.1", proxy.port)
        server.request(self.command, self.path, body, dict(self.headers))
        response = server.getresponse()
        reply = response.status, dict(response.getheaders()), response.read()
        server.close()
        if "list-type=2" in self.path:
            if fault == "stale":
                reply = proxy.lists.get(self.path, reply)
            else:
                proxy.lists[self.path] = reply
        if callable(fault):
            fault()
        if fault == "lose":
            return self.hang_up()
        self.reply(*reply, is_cut=fault == "cut")

    def reply(self, status: int, headers: dict[str, str], body: bytes, is_cut: bool = False) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        size = next((value for name, value in headers.items() if name.lower() == "content-length"), len(body))
        self.send_header("Content-Length", str(size))  # a HEAD request is answered with that of the object
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if is_cut else body)
        if is_cut and body:
            self.hang_up()

    def hang_up(self) -> None:
        self.wfile.flush()
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer
