"""What a pod of the cluster connects with."""

from __future__ import annotations

from typing import Any

from ._endpoint import ClientOptions

#: kubefan's Service for gRPC clients, as docs/install.md makes it: the name has an address for each
#: replica, and the client chooses.
ADDRESS = "https://kubefan-headless.kubefan.svc:7443"
#: Where a pod mounts `ca.crt` of the ConfigMap `kubefan-ca`.
CA_FILE = "/etc/kubefan/ca.crt"
#: Where every pod has the token of its service account. The kubelet renews it.
TOKEN_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/token"


def in_cluster_options(address: str, options: dict[str, Any]) -> tuple[str, ClientOptions]:
    """The address and the options of a client in a pod."""
    return address or ADDRESS, ClientOptions(
        **{"ca_file": CA_FILE, "token_file": TOKEN_FILE, **options}
    )
