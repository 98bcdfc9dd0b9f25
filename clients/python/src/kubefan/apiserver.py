"""Reads from a kube-apiserver while kubefan is away: `ClientOptions(apiserver=…)`.

It needs no other package. `Apiserver.from_configuration` takes the configuration of the official
client, for kubeconfig files with all their ways to log in. docs/clients-fallback.md says when the
apiserver is asked, and what a program sees.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import os
import random
import socket
import ssl
import threading
from dataclasses import dataclass
from typing import Any, Callable, Optional, Union
from urllib.parse import urlencode, urlsplit

import grpc

from ._projection import identity, json_bytes, project
from ._token import Token
from .errors import (
    Expired,
    Forbidden,
    InvalidArgument,
    KubefanError,
    LimitReached,
    NotFound,
    Unauthenticated,
    Unavailable,
)
from .items import Resource
from .objects import EventType, Object
from .options import Projection, Target
from .reasons import ErrorReason

_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_CONNECT_SECONDS = 10.0
#: The limit of a list or a get. kube-apiserver's own limit is a minute.
_READ_SECONDS = 120.0
#: The shortest timeout of a watch, and the longest is twice that, as in client-go.
_WATCH_SECONDS_MIN = 300
#: The apiserver may keep a watch for this many seconds without its headers.
_WATCH_HEADERS_SECONDS = 30.0
#: The longest delay before a retry that the apiserver may ask for.
_RETRY_SECONDS_MAX = 60.0
#: The apiserver gets this many seconds to end a watch after its timeout.
_WATCH_GRACE_SECONDS = 30.0
_JSON = "application/json"
_METADATA = "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io"
_METADATA_LIST = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"
_DISCOVERY = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"

#: Resources of each cluster that need no discovery: a program that starts while kubefan is away
#: reads most often one of them.
_BUILT_IN = {
    "/v1": "configmaps endpoints events limitranges persistentvolumeclaims pods "
    "replicationcontrollers resourcequotas secrets serviceaccounts services",
    "apps/v1": "controllerrevisions daemonsets deployments replicasets statefulsets",
    "batch/v1": "cronjobs jobs",
    "coordination.k8s.io/v1": "leases",
    "discovery.k8s.io/v1": "endpointslices",
    "networking.k8s.io/v1": "ingresses networkpolicies",
    "policy/v1": "poddisruptionbudgets",
}
#: Those that are not in namespaces.
_BUILT_IN_OF_CLUSTER = {
    "/v1": "namespaces nodes persistentvolumes",
    "storage.k8s.io/v1": "csidrivers csinodes storageclasses volumeattachments",
}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class Read:
    """A request to the apiserver. `resource` is None if kubefan has not resolved it."""

    target: Target
    projection: Projection
    resource: Optional[Resource] = None


#: A list: its version, the resource, the objects.
State = tuple[str, Resource, list[Object]]


class Abort:
    """Ends a request from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: Optional[socket.socket] = None
        self.is_set = False

    def set(self) -> None:
        """Ends the request, and each later one."""
        with self._lock:
            self.is_set = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def attach(self, made: socket.socket) -> None:
        """Ends this connection with the request."""
        with self._lock:
            self._socket = made
            if self.is_set:
                raise OSError("the request was ended")

    def detach(self) -> None:
        """The connection is closed."""
        with self._lock:
            self._socket = None


class Apiserver:
    """An apiserver, and the credentials for it. Threads may share it."""

    def __init__(
        self,
        server: str,
        *,
        ca_file: Optional[str] = None,
        token: Optional[str] = None,
        token_file: Optional[str] = None,
        client_certificate_file: Optional[str] = None,
        client_key_file: Optional[str] = None,
    ) -> None:
        """`server` is a URL, such as `https://10.0.0.1:6443`. Files are read for each connection.

        Raises ValueError for another address, and for credentials without TLS.
        """
        self._set_server(server)
        if self._scheme == "http" and (token or token_file or ca_file or client_certificate_file):
            raise ValueError(f"{server!r} has no TLS, so it takes no credentials and no ca_file")
        self._token = Token(token, token_file)
        self._authorization: Callable[[], Optional[str]] = self._token.header
        self._ca_file = ca_file
        self._certificate = (client_certificate_file, client_key_file)
        self._verifies = True
        self._places: dict[str, Resource] = {}

    def _set_server(self, server: str) -> None:
        parts = urlsplit(server)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ValueError(f"{server!r} is no URL of an apiserver, such as https://10.0.0.1:6443")
        self.server = server.rstrip("/")
        self._scheme, self._host = parts.scheme, parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._prefix = parts.path.rstrip("/")

    @classmethod
    def in_cluster(cls) -> Apiserver:
        """The apiserver of the pod's cluster, with the token of its service account.

        Raises KeyError outside of a pod.
        """
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
        return cls(
            f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
            ca_file=f"{_ACCOUNT}/ca.crt",
            token_file=f"{_ACCOUNT}/token",
        )

    @classmethod
    def from_configuration(cls, configuration: Any) -> Apiserver:
        """The apiserver of a `kubernetes.client.Configuration`, of the official client.

        Fill it with `kubernetes.config.load_kube_config(client_configuration=configuration)`. Its
        token is asked for before each request, so plugins that renew it work. Proxies do not.

        Raises ValueError for an address without TLS on another machine.
        """
        made = cls(configuration.host)
        if made._scheme == "http" and not _is_loopback(made._host):
            raise ValueError(f"{made.server!r} has no TLS, so it gets no credentials: use https://")
        made._ca_file = configuration.ssl_ca_cert
        made._certificate = (configuration.cert_file, configuration.key_file)
        made._verifies = configuration.verify_ssl

        def authorization() -> Optional[str]:
            for name in ("BearerToken", "authorization"):
                value: Optional[str] = configuration.get_api_key_with_prefix(name)
                if value:
                    return value
            return None

        made._authorization = authorization
        return made

    def __repr__(self) -> str:
        return f"Apiserver({self.server!r})"

    def list(self, read: Read, abort: Abort) -> State:
        """The present state."""
        place = self._place(read, abort)
        accept = _METADATA_LIST if read.projection.metadata_only else _JSON
        path = _path(place, read.target) + _query(_selection(read.target))
        found = self._json(path, accept, abort, ErrorReason.RESOURCE_NOT_FOUND)
        version = (found.get("metadata") or {}).get("resourceVersion")
        if not version:
            raise self._failure("a list without a version")
        kind = found.get("kind", "")
        kind = kind[: -len("List")] if kind.endswith("List") else kind
        objects = []
        for item in found.get("items") or []:
            if not item.get("kind"):
                # A list leaves out what each object of a watch has.
                item = {"kind": kind, "apiVersion": found.get("apiVersion"), **item}
            objects.append(_object(item, None, read.projection))
        return version, place, objects

    def get(self, read: Read, abort: Abort) -> Object:
        """One object."""
        place = self._place(read, abort)
        accept = _METADATA if read.projection.metadata_only else _JSON
        path = _path(place, read.target, read.target.name)
        found = self._json(path, accept, abort, ErrorReason.OBJECT_NOT_FOUND)
        return _object(found, None, read.projection)

    def watch(self, read: Read, version: str, abort: Abort) -> ApiserverWatch:
        """The events after a version."""
        place = self._place(read, abort)
        seconds = round(_WATCH_SECONDS_MIN * (1 + random.random()))
        parameters = {
            **_selection(read.target),
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(seconds),
        }
        accept = _METADATA if read.projection.metadata_only else _JSON
        path = _path(place, read.target) + _query(parameters)
        connection, response = self._send(
            path, accept, abort, ErrorReason.RESOURCE_NOT_FOUND, _WATCH_HEADERS_SECONDS
        )
        if connection.sock is not None:
            connection.sock.settimeout(seconds + _WATCH_GRACE_SECONDS)
        return ApiserverWatch(self, connection, response, read, abort)

    def _json(self, path: str, accept: str, abort: Abort, not_found: str) -> dict[str, Any]:
        connection, response = self._send(path, accept, abort, not_found, _READ_SECONDS)
        try:
            found = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._failure(f"an answer that cannot be read: {error}") from None
        finally:
            abort.detach()
            connection.close()
        if not isinstance(found, dict):
            raise self._failure("an answer that is no object")
        return found

    def _send(
        self, path: str, accept: str, abort: Abort, not_found: str, seconds: float
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """An answer that is no error. Each request has a connection of its own."""
        connection: Optional[http.client.HTTPConnection] = None
        try:
            connection = self._connection()
            connection.connect()
            made: socket.socket = connection.sock
            _keep_alive(made)
            abort.attach(made)
            made.settimeout(seconds)
            headers = {"Accept": accept, "User-Agent": "kubefan-python"}
            authorization = self._authorization()
            if authorization is not None:
                headers["Authorization"] = authorization
            connection.request("GET", self._prefix + path, headers=headers)
            response = connection.getresponse()
            if response.status == 200:
                return connection, response
            body = response.read(1 << 20)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if connection is not None:
                abort.detach()
                connection.close()
            raise self._failure(f"cannot reach it: {error}") from None
        abort.detach()
        connection.close()
        retry_after = response.getheader("Retry-After", "")
        raise self._refusal(response.status, _status(body), not_found, retry_after)

    def _connection(self) -> http.client.HTTPConnection:
        if self._scheme == "http":
            return http.client.HTTPConnection(self._host, self._port, timeout=_CONNECT_SECONDS)
        context = ssl.create_default_context(cafile=self._ca_file)
        if not self._verifies:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        certificate, key = self._certificate
        if certificate is not None:
            context.load_cert_chain(certificate, key)
        return http.client.HTTPSConnection(
            self._host, self._port, timeout=_CONNECT_SECONDS, context=context
        )

    def _failure(self, problem: str) -> KubefanError:
        """An error that a retry may fix."""
        return Unavailable(
            f"the apiserver at {self.server}: {problem}",
            code=grpc.StatusCode.UNAVAILABLE,
            reason=ErrorReason.UPSTREAM_UNAVAILABLE,
        )

    def _refusal(
        self, status: int, details: dict[str, Any], not_found: str, retry_after: str = ""
    ) -> KubefanError:
        """The error that kubefan would have."""
        kinds: dict[int, tuple[type[KubefanError], grpc.StatusCode, str]] = {
            401: (
                Unauthenticated,
                grpc.StatusCode.UNAUTHENTICATED,
                ErrorReason.UNAUTHENTICATED,
            ),
            403: (Forbidden, grpc.StatusCode.PERMISSION_DENIED, ErrorReason.FORBIDDEN),
            404: (NotFound, grpc.StatusCode.NOT_FOUND, not_found),
            410: (Expired, grpc.StatusCode.OUT_OF_RANGE, ErrorReason.TOO_OLD),
            429: (LimitReached, grpc.StatusCode.RESOURCE_EXHAUSTED, ErrorReason.LIMIT_REACHED),
        }
        kind, code, reason = kinds.get(
            status,
            (Unavailable, grpc.StatusCode.UNAVAILABLE, ErrorReason.UPSTREAM_UNAVAILABLE)
            if status >= 500
            else (
                InvalidArgument,
                grpc.StatusCode.INVALID_ARGUMENT,
                ErrorReason.INVALID_ARGUMENT,
            ),
        )
        delay: Union[int, str, None] = retry_after or (details.get("details") or {}).get(
            "retryAfterSeconds"
        )
        seconds = float(delay) if delay is not None and str(delay).isdecimal() else None
        if status == 429:
            seconds = max(seconds or 0.0, 1.0)
        if seconds is not None:
            seconds = min(seconds, _RETRY_SECONDS_MAX)
        message = details.get("message") or "no message"
        return kind(
            f"the apiserver at {self.server} answers {status}: {message}",
            code=code,
            reason=reason,
            retry_after=seconds,
        )

    def _place(self, read: Read, abort: Abort) -> Resource:
        """Finds a resource.

        It is as kubefan has resolved it, or as the target names it, or among the built-in ones, or
        in the discovery documents.
        """
        if read.resource is not None:
            return read.resource
        target = read.target
        if target.version:
            return Resource(target.group, target.version, target.resource, "", True)
        name = f"{target.resource}.{target.group}" if target.group else target.resource
        resource, _, group = name.lower().partition(".")
        for table, is_namespaced in ((_BUILT_IN, True), (_BUILT_IN_OF_CLUSTER, False)):
            for path, resources in table.items():
                of, _, version = path.partition("/")
                if of == group and resource in resources.split():
                    return Resource(of, version, resource, "", is_namespaced)
        if name in self._places:
            return self._places[name]
        # The core group comes first, then the groups in the server's order.
        for root in ("/api", "/apis"):
            groups = self._json(root, _DISCOVERY, abort, ErrorReason.RESOURCE_NOT_FOUND)
            found = _find(groups, resource, group)
            if found is not None:
                self._places[name] = found
                return found
        message = f"it doesn't have a resource type {name!r}"
        raise self._refusal(404, {"message": message}, ErrorReason.RESOURCE_NOT_FOUND)


class ApiserverWatch:
    """The events of one request. One thread reads it."""

    def __init__(
        self,
        server: Apiserver,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
        read: Read,
        abort: Abort,
    ) -> None:
        self._server = server
        self._connection = connection
        self._response = response
        self._read = read
        self._abort = abort

    def next(self) -> Union[tuple[EventType, Object], str, None]:
        """The next event, or the version of a bookmark. None after the watch's timeout."""
        while True:
            try:
                line = self._response.readline()
                if not line:
                    return None
                found = json.loads(line)
                kind, content = found["type"], found["object"]
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                raise self._server._failure(f"the watch broke: {error}") from None
            if kind == "BOOKMARK":
                version: str = content["metadata"]["resourceVersion"]
                return version
            if kind == "ERROR":
                not_found = ErrorReason.RESOURCE_NOT_FOUND
                raise self._server._refusal(content.get("code") or 500, content, not_found)
            if kind in EventType.__members__:
                prefix = b'{"type":"%s","object":' % kind.encode()
                raw = None
                if line.startswith(prefix):
                    raw = line.strip()[len(prefix) : -1]
                return EventType[kind], _object(content, raw, self._read.projection)
            # Another type is of a newer server. The watch goes on.

    def close(self) -> None:
        """Ends the watch."""
        self._abort.detach()
        self._connection.close()


def _keep_alive(made: socket.socket) -> None:
    """Notices a dead connection within half a minute."""
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _object(content: dict[str, Any], raw: Optional[bytes], projection: Projection) -> Object:
    if projection.leaves_out():
        known = identity(content)
        return Object(*known, json_bytes(project(content, projection)))
    return Object(*identity(content), json_bytes(content) if raw is None else raw)


def _status(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        return {"message": body[:200].decode(errors="replace").strip()}
    return found if isinstance(found, dict) else {}


def _selection(target: Target) -> dict[str, str]:
    fields = [f"metadata.name={target.name}"] if target.name else []
    fields += [target.field_selector] if target.field_selector else []
    made = {"labelSelector": target.label_selector, "fieldSelector": ",".join(fields)}
    return {name: value for name, value in made.items() if value}


def _query(parameters: dict[str, str]) -> str:
    return f"?{urlencode(parameters)}" if parameters else ""


def _path(place: Resource, target: Target, name: str = "") -> str:
    path = f"/apis/{place.group}/{place.version}" if place.group else f"/api/{place.version}"
    if target.namespace and place.namespaced:
        path += f"/namespaces/{target.namespace}"
    return f"{path}/{place.resource}" + (f"/{name}" if name else "")


def _find(groups: dict[str, Any], resource: str, rest: str) -> Optional[Resource]:
    """The resource with this name, or else with this short name.

    The rest of the name is a group, the beginning of one, or a version and a group.
    """
    short: Optional[Resource] = None
    for group in groups.get("items") or []:
        name = (group.get("metadata") or {}).get("name") or ""
        for version in group.get("versions") or []:
            if rest and not name.startswith(rest) and rest != f"{version['version']}.{name}":
                continue
            for item in version.get("resources") or []:
                kind = (item.get("responseKind") or {}).get("kind", "")
                is_namespaced = item.get("scope") != "Cluster"
                made = Resource(name, version["version"], item["resource"], kind, is_namespaced)
                if resource in (item["resource"], item.get("singularResource")):
                    return made
                if short is None and resource in (item.get("shortNames") or []):
                    short = made
    return short
