"""One end of a private ZeroMQ pair on the server's event loop; frames in, frames out, no waiting.

ZeroMQ tells of news through one file descriptor, and only when nothing was left unread: so each
wake reads until there is no more, and each send looks whether it hid news from the descriptor.
This costs a fraction of what awaiting each frame does, and one frame holds all events of a step.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import zmq


class Link:
    """Bound by the server before its worker starts; closed when that worker is gone.

    Args:
        address: where to bind, e.g. `ipc:///run/private/work-1`.
        on_frame: called on the loop for each frame, in order.
    """

    def __init__(self, address: str, on_frame: Callable[[bytes], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_frame = on_frame
        self._unsent: deque[bytes] = deque()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        # no limit here: the client counts admitted requests (O63) and pauses slow ones (O85)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 0)  # what a dead worker did not read is nobody's
        self._socket.bind(address)
        self._news = int(self._socket.get(zmq.FD))
        self._loop.add_reader(self._news, self._on_news)

    def send(self, frame: bytes) -> bool:
        """Queue a frame, if need be until the worker connects; False when this end is closed."""
        if self._socket.closed:
            return False
        self._unsent.append(frame)
        self._write()
        if int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._on_news)
        return True

    def read(self) -> None:
        """Hand over every frame that has arrived."""
        while not self._socket.closed:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_frame(frame)

    def _on_news(self) -> None:
        self.read()
        if self._unsent and not self._socket.closed:
            self._write()

    def _write(self) -> None:
        while self._unsent:
            try:
                self._socket.send(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                return  # nobody is connected yet: the descriptor tells when
            self._unsent.popleft()

    def close(self) -> None:
        """Stop listening; closing twice does nothing."""
        if not self._socket.closed:
            self._loop.remove_reader(self._news)
            self._socket.close()
