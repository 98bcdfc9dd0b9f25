"""The connection to a server: the address, TLS, and the settings of the channel."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import grpc

from ._fallback import Budget
from ._fallback_reads import FallbackReads, OnSide, OnStart
from ._token import Token
from ._version import __version__
from .apiserver import Apiserver
from .errors import InvalidAddress, Unreachable
from .options import check_at_least, check_seconds

#: The version that the server sees.
USER_AGENT = f"kubefan-python/{__version__}"
#: With HTTP/2's default of 64 KiB a snapshot arrives at a quarter of the speed.
_STREAM_WINDOW_BYTES = 4 << 20
_FRAME_BYTES_MAX = 1 << 20
_HOST_PORT = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):([0-9]{1,5})")


@dataclass(frozen=True)
class ClientOptions:
    """Settings of a connection.

    Attributes:
        ca_file: PEM file with the CA that signed kubefan's certificate, in place of the system's
            CAs. Only for `https://`.
        server_name: The name in kubefan's certificate, if it is not that of the address. Only for
            `https://`.
        token: A bearer token. Only for `https://` and Unix sockets.
        token_file: A file with a token, which takes precedence. It is read again after 10 s, and
            at once when kubefan refuses the token.
        client_certificate_file: PEM file with the client's certificate. Only for `https://`. Read
            once.
        client_key_file: PEM file with its private key.
        connect_timeout: Limit for establishing a connection, in seconds.
        message_bytes_max: The longest message accepted, in bytes.
        keepalive_interval: A silent connection gets an HTTP/2 PING after this many seconds.
        keepalive_timeout: A PING without an answer for this many seconds means that the connection
            is dead; a watch then reconnects.
        apiserver: Is read from while kubefan is away, within the budget (docs/clients-fallback.md).
            With it the defaults are 3 s for connections, and 4 s for each silence and PING.
        budget: The limit of reads at the apiserver. A budget in kubefan's answers replaces it.
        on_side: Called with each state of kubefan and its reason. It must not block, nor call the
            client.
        on_start: Called with the seconds that each start at the apiserver has waited.
    """

    ca_file: Optional[str] = None
    token: Optional[str] = None
    token_file: Optional[str] = None
    client_certificate_file: Optional[str] = None
    client_key_file: Optional[str] = None
    connect_timeout: float = 10.0
    message_bytes_max: int = 64 << 20
    keepalive_interval: float = 30.0
    keepalive_timeout: float = 15.0
    server_name: Optional[str] = None
    apiserver: Optional[Apiserver] = None
    budget: Optional[Budget] = None
    on_side: Optional[OnSide] = None
    on_start: Optional[OnStart] = None

    def __post_init__(self) -> None:
        if self.apiserver is not None:
            # A kubefan that hangs is noticed soon, unless the program says otherwise.
            for name, usual, seconds in (
                ("connect_timeout", 10.0, 3.0),
                ("keepalive_interval", 30.0, 4.0),
                ("keepalive_timeout", 15.0, 4.0),
            ):
                if getattr(self, name) == usual:
                    object.__setattr__(self, name, seconds)
        check_seconds("connect_timeout", self.connect_timeout)
        check_seconds("keepalive_interval", self.keepalive_interval)
        check_seconds("keepalive_timeout", self.keepalive_timeout)
        check_at_least("message_bytes_max", self.message_bytes_max, 1)

    def __repr__(self) -> str:
        token = "…" if self.token is not None else None
        files = f"ca_file={self.ca_file!r}, token_file={self.token_file!r}"
        return f"ClientOptions({files}, token={token!r})"


@dataclass(frozen=True)
class Endpoint:
    """The parts of a channel, and the address and credentials of its calls."""

    address: str
    target: str
    credentials: Optional[grpc.ChannelCredentials]
    settings: list[tuple[str, Any]]
    token: Token
    #: The reads that may go to the apiserver. None without one.
    fallback: Optional[FallbackReads] = None

    def authorization(self) -> Optional[str]:
        """The token for the next call, if there is one. Raises `Unreachable`."""
        # A short file on a file system in memory: reading it does not keep an event loop.
        try:
            return self.token.header()
        except (OSError, ValueError) as error:
            raise Unreachable(f"cannot reach kubefan at {self.address}: {error}") from None


def endpoint(address: str, options: ClientOptions) -> Endpoint:
    """Reads an address: `host:port`, `http://…`, `https://…`, `dns:host:port`, `unix:/path`.

    Raises `InvalidAddress`, also for files that cannot be read, and for a token that others could
    read on the way.
    """

    def wrong(problem: str) -> InvalidAddress:
        return InvalidAddress(f"{address!r}: {problem}", code=grpc.StatusCode.INVALID_ARGUMENT)

    tls = address.startswith("https://")
    unix = address.startswith("unix:")
    if unix:
        target = address
    else:
        host = re.sub(r"^(https?://|dns:/*)", "", address).rstrip("/")
        match = _HOST_PORT.fullmatch(host)
        if match is None or not 0 < int(match[2]) < 1 << 16:
            raise wrong(
                "not an address of kubefan; write it like 127.0.0.1:7443, https://host:port, "
                "dns:host:port or unix:/path"
            )
        # gRPC gives a name a scheme by itself, and looks it up at every connect.
        target = host
    try:
        token = Token(options.token, options.token_file)
    except ValueError as error:
        raise wrong(str(error)) from None
    if token.is_set and not tls and not unix:
        raise wrong(
            "a token is sent only over TLS or to a Unix socket, because others could read it on "
            f"the way; use https://{target} (kubefan serve --tls-cert-file), or leave the token out"
        )
    credentials = None
    if tls:
        key, certificate = options.client_key_file, options.client_certificate_file
        if (key is None) != (certificate is None):
            raise wrong("a client certificate needs both its file and the file of its key")
        try:
            credentials = grpc.ssl_channel_credentials(
                _pem(options.ca_file, "CERTIFICATE"),
                _pem(key, "PRIVATE KEY"),
                _pem(certificate, "CERTIFICATE"),
            )
        except (OSError, ValueError) as error:
            raise wrong(str(error)) from None
    else:
        only_tls = ("ca_file", "client_certificate_file", "client_key_file", "server_name")
        given = [name for name in only_tls if getattr(options, name) is not None]
        if given:
            raise wrong(f"only an https:// address takes {' and '.join(given)}")
    settings = [
        ("grpc.primary_user_agent", USER_AGENT),
        ("grpc.keepalive_time_ms", round(options.keepalive_interval * 1000)),
        ("grpc.keepalive_timeout_ms", round(options.keepalive_timeout * 1000)),
        # A PING has a limit of its own, a minute by default, and the longer one counts.
        ("grpc.http2.ping_timeout_ms", round(options.keepalive_timeout * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", options.message_bytes_max),
        ("grpc.http2.lookahead_bytes", _STREAM_WINDOW_BYTES),
        ("grpc.http2.max_frame_size", _FRAME_BYTES_MAX),
        # The watch has a backoff and retries of its own.
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.min_reconnect_backoff_ms", round(options.connect_timeout * 1000)),
        # A name may have the address of each replica. A call goes to the next reachable replica, so
        # a watch that resumes leaves a replica that lags.
        ("grpc.service_config", '{"loadBalancingConfig":[{"round_robin":{}}]}'),
        # One connection per client, so that two clients do not share their fate.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if options.server_name is not None:
        settings.append(("grpc.ssl_target_name_override", options.server_name))
    return Endpoint(address, target, credentials, settings, token)


def _pem(file: Optional[str], kind: str) -> Optional[bytes]:
    """The content of a PEM file. A file without such a part would look like a wrong server."""
    if file is None:
        return None
    content = Path(file).read_bytes()
    if f"{kind}-----".encode() not in content:
        raise ValueError(f"{file} contains no PEM {kind.lower()}")
    return content
