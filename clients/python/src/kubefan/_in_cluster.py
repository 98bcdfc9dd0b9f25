"""Settings with which a pod of the cluster connects."""

from __future__ import annotations

from typing import Any, Optional, TypedDict

from ._endpoint import ClientOptions
from ._fallback import Budget
from ._fallback_reads import OnSide, OnStart
from .apiserver import Apiserver

#: kubefan's Service for gRPC clients, as docs/install.md makes it: the name has an address for each
#: replica, and the client chooses.
ADDRESS = "https://kubefan-headless.kubefan.svc:7443"
#: Where a pod mounts `ca.crt` of the ConfigMap `kubefan-ca`.
CA_FILE = "/etc/kubefan/ca.crt"
#: Where every pod has the token of its service account. The kubelet renews it.
TOKEN_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/token"


class ClientKeywords(TypedDict, total=False):
    """The fields of `ClientOptions`."""

    ca_file: Optional[str]
    token: Optional[str]
    token_file: Optional[str]
    client_certificate_file: Optional[str]
    client_key_file: Optional[str]
    connect_timeout: float
    message_bytes_max: int
    keepalive_interval: float
    keepalive_timeout: float
    server_name: Optional[str]
    apiserver: Optional[Apiserver]
    budget: Optional[Budget]
    on_side: Optional[OnSide]
    on_start: Optional[OnStart]


def in_cluster_options(address: str, options: dict[str, Any]) -> tuple[str, ClientOptions]:
    """The address and the options of a client in a pod."""
    files = {"ca_file": CA_FILE}
    # A file takes precedence, so that of the pod would replace a token that the program gives.
    if options.get("token") is None:
        files["token_file"] = TOKEN_FILE
    return address or ADDRESS, ClientOptions(**{**files, **options})
