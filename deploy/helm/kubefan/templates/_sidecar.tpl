{{/*
kubefan as a sidecar of another chart's pod: the chart depends on this one with cluster.enabled=false,
and includes two templates with the same argument (README.md has an example).

kubefan.sidecar is an entry of initContainers (restartPolicy: Always: it starts before the other
containers and stops after them); kubefan.sidecarVolumes are its volumes. The argument:
  image:          the image
  resources:      what is cached, as kubectl names it: [pods]
  args:           further flags, such as --upstream-field-selector=spec.nodeName=$(NODE_NAME)
  configMap:      a ConfigMap with a configuration file as config.yaml, for limits and tuning; optional
  containerResources: requests and limits
The pod sets automountServiceAccountToken: false, so that only the sidecar has the token. The other
containers mount the volume kubefan-socket, and read unix:/run/kubefan/kubefan.sock. They need the
sidecar's user, because only that user may connect (--listen-mode).
*/}}
{{- define "kubefan.sidecar" -}}
name: kubefan
image: {{ .image }}
restartPolicy: Always
args:
  - serve
  # Only processes of the same user can connect: callers are not distinguished.
  - --listen=unix:/run/kubefan/kubefan.sock
  - --admin-listen=:7444
  {{- range .resources }}
  - --resource={{ . }}
  {{- end }}
  {{- if .configMap }}
  - --config=/etc/kubefan/config/config.yaml
  {{- end }}
  {{- range .args }}
  - {{ . }}
  {{- end }}
env:
  - name: NODE_NAME
    valueFrom:
      fieldRef: { fieldPath: spec.nodeName }
ports:
  - { name: http-admin, containerPort: 7444 }
# The other containers start once the cache is synced.
startupProbe:
  httpGet: { path: /readyz, port: http-admin }
  periodSeconds: 1
  failureThreshold: 300
livenessProbe:
  httpGet: { path: /livez, port: http-admin }
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
resources:
  {{- toYaml (.containerResources | default (dict "requests" (dict "cpu" "20m" "memory" "32Mi") "limits" (dict "memory" "128Mi"))) | nindent 2 }}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  seccompProfile:
    type: RuntimeDefault
  {{- include "kubefan.containerSecurity" . | nindent 2 }}
volumeMounts:
  - { name: kubefan-socket, mountPath: /run/kubefan }
  - { name: kubefan-token, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true }
  {{- if .configMap }}
  - { name: kubefan-config, mountPath: /etc/kubefan/config, readOnly: true }
  {{- end }}
{{- end }}

{{- define "kubefan.sidecarVolumes" -}}
- name: kubefan-socket
  emptyDir: { medium: Memory, sizeLimit: 1Mi }
{{- with .configMap }}
- name: kubefan-config
  configMap: { name: {{ . }} }
{{- end }}
# Only kubefan mounts it.
- name: kubefan-token
  projected:
    defaultMode: 292
    sources:
      - serviceAccountToken: { path: token, expirationSeconds: 3607 }
      - configMap: { name: kube-root-ca.crt, items: [{ key: ca.crt, path: ca.crt }] }
      - downwardAPI: { items: [{ path: namespace, fieldRef: { fieldPath: metadata.namespace } }] }
{{- end }}
