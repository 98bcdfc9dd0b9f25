"""The connection of the sync client, which also makes progress between two calls."""

from __future__ import annotations

import threading
import time
from typing import Callable

import grpc

#: gRPC's thread that follows the state of a channel waits at most 0.2 s at a time, and looks only
#: then whether anyone still wants to know (`_poll_connectivity` in grpc/_channel.py). It may wait
#: once more if a listener has just asked it to connect. In seconds.
POLL_SECONDS_MAX = 0.4

Listener = Callable[[grpc.ChannelConnectivity], None]


class Connection:
    """A channel, and the watches that wait for it. Threads may share it.

    Without a call, gRPC looks at its sockets only every five seconds, so an attempt to connect that
    has succeeded or failed long ago would count as still under way. A listener changes that.
    """

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        # A signal handler may close the client in the middle of another call.
        self._lock = threading.RLock()
        self._listeners: set[Listener] = set()
        self._polled_until = 0.0
        self._closed = False

    def attend(self, listener: Listener) -> None:
        """Has gRPC connect without a call, until `ignore` or `close`."""
        with self._lock:
            if not self._closed and listener not in self._listeners:
                self.channel.subscribe(listener, try_to_connect=True)
                self._listeners.add(listener)

    def ignore(self, listener: Listener) -> None:
        """Takes the listener back, if there is one."""
        with self._lock:
            self._remove(listener)

    def close(self) -> None:
        """Closes the channel, and ends all its calls. Takes up to 0.4 s while gRPC connects."""
        with self._lock:
            self._closed = True
            for listener in list(self._listeners):
                self._remove(listener)
            # gRPC's thread would print an exception if the channel were closed while it waits.
            rest = self._polled_until - time.monotonic()
        try:
            if rest > 0:
                time.sleep(rest)
        finally:
            self.channel.close()

    def _remove(self, listener: Listener) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)
            self.channel.unsubscribe(listener)
            self._polled_until = time.monotonic() + POLL_SECONDS_MAX
