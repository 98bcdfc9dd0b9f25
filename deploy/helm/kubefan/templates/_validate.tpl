{{/* Contradictions between values, which the schema cannot express. */}}
{{- define "kubefan.validate" -}}
{{- if and .Values.node.enabled (not .Values.cluster.enabled) }}
{{- fail "node.enabled needs cluster.enabled: the pods of the nodes watch through the cluster form" }}
{{- end }}
{{- range .Values.resources }}
{{- if and $.Values.node.enabled (eq .name "secrets") (not .group) }}
{{- fail "resources must not have secrets if node.enabled: each node would hold all of them" }}
{{- end }}
{{- if and $.Values.namespaces (not .group) (has .name (list "namespaces" "nodes" "persistentvolumes")) }}
{{- fail (printf "resources has %s, which have no namespace, but namespaces restricts what is cached: remove one of them" .name) }}
{{- end }}
{{- end }}
{{- if and (not .Values.rbac.clusterScoped) (not .Values.namespaces) }}
{{- fail "rbac.clusterScoped=false needs namespaces: without them kubefan caches the whole cluster" }}
{{- end }}
{{- if and (not .Values.rbac.clusterScoped) (eq .Values.passthrough.mode "impersonate") }}
{{- fail "passthrough.mode=impersonate needs rbac.clusterScoped: the right to impersonate is a ClusterRole" }}
{{- end }}
{{- if and (eq .Values.tls.source "existingSecret") (not .Values.tls.existingSecret) }}
{{- fail "tls.source=existingSecret needs tls.existingSecret, the name of a Secret with tls.crt and tls.key" }}
{{- end }}
{{- if and (eq .Values.tls.source "certManager") (not .Values.tls.certManager.issuerRef.name) }}
{{- fail "tls.source=certManager needs tls.certManager.issuerRef.name" }}
{{- end }}
{{- if and .Values.tls.certManager.bundle.enabled (or (ne .Values.tls.source "certManager") (not .Values.tls.certManager.bundle.secretName)) }}
{{- fail "tls.certManager.bundle.enabled needs tls.source=certManager and tls.certManager.bundle.secretName" }}
{{- end }}
{{- $drain := include "kubefan.seconds" (.Values.drainTimeout | default "10s") | int }}
{{- range $form := list "cluster" "node" }}
{{- $values := index $.Values $form }}
{{- if and $values.enabled (le (int $values.terminationGracePeriodSeconds) (add (int $values.preStopSeconds) $drain | int)) }}
{{- fail (printf "%s.terminationGracePeriodSeconds=%d must be longer than preStopSeconds (%d) and drainTimeout (%ds) together" $form (int $values.terminationGracePeriodSeconds) (int $values.preStopSeconds) $drain) }}
{{- end }}
{{- end }}
{{- with .Values.cluster.autoscaling }}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) }}
{{- fail (printf "cluster.autoscaling.minReplicas=%d is more than maxReplicas=%d" (int .minReplicas) (int .maxReplicas)) }}
{{- end }}
{{- end }}
{{- range list "apiVersion" "kind" }}
{{- if hasKey $.Values.config . }}
{{- fail (printf "config has %s, which the chart sets" .) }}
{{- end }}
{{- end }}
{{- range .Values.extraArgs }}
{{- if regexMatch "^--(listen|admin-listen|resource|namespace|tls-managed|peer-listen|peers)" . }}
{{- fail (printf "extraArgs has %s, which the chart sets from other values" .) }}
{{- end }}
{{- end }}
{{- end }}
