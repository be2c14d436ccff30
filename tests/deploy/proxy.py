"""A TCP proxy on the loopback that ends its connections after a number of bytes."""

from __future__ import annotations

import contextlib
import socket
import threading


class Proxy:
    """Passes bytes both ways to 127.0.0.1:`port`; `passed` counts them, all connections together."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self.passed = 0
        self._limit: int | None = None

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._cut()

    def cut_after(self, count: int) -> None:
        """The next `count` bytes still pass; then everything is cut, once."""
        with self._lock:
            self.passed, self._limit = 0, count

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                with self._lock:
                    self._open += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                with self._lock:
                    allowed = len(data) if self._limit is None else min(len(data), self._limit - self.passed)
                    self.passed += allowed
                    cut = allowed < len(data)
                target.sendall(data[:allowed])
                if cut:
                    with self._lock:
                        self._limit = None
                    return self._cut()
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _cut(self) -> None:
        with self._lock:
            ends, self._open = self._open, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
