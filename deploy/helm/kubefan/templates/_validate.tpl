{{/* The end of a sentence about a setting that is the value `access` now, from the setting's old value. */}}
{{- define "kubefan.accessOf" -}}
{{- $access := get (dict "caller" "authorized" "impersonate" "authorized-impersonate" "off" "authorized-cache-only" "false" "authorized-cache-only") (toString .) }}
{{- with $access }}set access={{ . }}{{ else }}set access=authorized, authorized-cache-only or authorized-impersonate{{ end }}
{{- end }}

{{/* Settings of earlier versions that are elsewhere now, also values that an upgrade has kept. */}}
{{- define "kubefan.moved" -}}
{{- with .Values.passthrough }}
{{- if kindIs "map" . }}
{{- fail (printf "passthrough.mode is now access: %s, and passthrough=null" (include "kubefan.accessOf" .mode)) }}
{{- end }}
{{- fail (printf "passthrough is now access: %s, and passthrough=null" (include "kubefan.accessOf" .)) }}
{{- end }}
{{- range $moved := .Files.Get "files/moved.yaml" | fromYamlArray }}
{{- /* The place of a flag is a value of the chart, because the chart's rights depend on it. */}}
{{- $isValue := hasPrefix "--" $moved.to }}
{{- range $name, $config := dict "config" $.Values.config "node.config" $.Values.node.config }}
{{- if hasKey $config $moved.key }}
{{- if $isValue }}
{{- fail (printf "%s.%s is now the value access: %s" $name $moved.key (include "kubefan.accessOf" (get $config $moved.key))) }}
{{- end }}
{{- fail (printf "%s.%s is now %s.%s" $name $moved.key $name $moved.to) }}
{{- end }}
{{- end }}
{{- range $.Values.extraArgs }}
{{- if eq (splitList "=" . | first) (printf "--%s" $moved.flag) }}
{{- if $isValue }}
{{- fail (printf "--%s of extraArgs is now the value access: %s" $moved.flag (include "kubefan.accessOf" (splitList "=" . | last))) }}
{{- end }}
{{- fail (printf "--%s of extraArgs is now config.%s" $moved.flag $moved.to) }}
{{- end }}
{{- end }}
{{- $variable := printf "KUBEFAN_%s" ($moved.flag | upper | replace "-" "_") }}
{{- range $.Values.extraEnv }}
{{- if eq .name $variable }}
{{- if $isValue }}
{{- fail (printf "%s of extraEnv is now the value access: %s" $variable (include "kubefan.accessOf" .value)) }}
{{- end }}
{{- fail (printf "%s of extraEnv is now config.%s" $variable $moved.to) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Refuses other ways to set what the value `access` sets. */}}
{{- define "kubefan.accessElsewhere" -}}
{{- $instead := "set the value access instead, because the rights that the chart grants depend on it" }}
{{- range $name, $config := dict "config" .Values.config "node.config" .Values.node.config }}
{{- if hasKey $config "access" }}
{{- fail (printf "%s has access: %s" $name $instead) }}
{{- end }}
{{- end }}
{{- range .Values.extraArgs }}
{{- if eq (splitList "=" . | first) "--access" }}
{{- fail (printf "extraArgs has --access: %s" $instead) }}
{{- end }}
{{- end }}
{{- range .Values.extraEnv }}
{{- if eq .name "KUBEFAN_ACCESS" }}
{{- fail (printf "extraEnv has KUBEFAN_ACCESS: %s" $instead) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Contradictions between values, which the schema cannot express. */}}
{{- define "kubefan.validate" -}}
{{- include "kubefan.moved" . }}
{{- include "kubefan.accessElsewhere" . }}
{{- include "kubefan.bootstrap" . }}
{{- if and .Values.cluster.state.enabled .Values.cluster.state.volume.persistentVolumeClaim }}
{{- if or .Values.cluster.autoscaling.enabled (gt (int .Values.cluster.replicas) 1) }}
{{- fail "cluster.state.volume.persistentVolumeClaim needs cluster.replicas=1 without autoscaling: one process uses the files at a time" }}
{{- end }}
{{- end }}
{{- if and .Values.node.enabled (not .Values.cluster.enabled) }}
{{- fail "node.enabled needs cluster.enabled: the pods of the nodes watch through the cluster form" }}
{{- end }}
{{- if .Values.node.enabled }}
{{- if eq .Values.access "authorized-cache-only" }}
{{- fail "access=authorized-cache-only needs node.enabled=false: the pods of the nodes ask the apiserver through the cluster form" }}
{{- end }}
{{- if not .Values.rbac.clusterScoped }}
{{- fail "node.enabled needs rbac.clusterScoped: the pods of the nodes compare the cluster's identity, and review their callers" }}
{{- end }}
{{- if and .Values.node.hostSocket.enabled .Values.admin.authorization }}
{{- fail "admin.authorization needs TLS, which the pods of the nodes do not have with node.hostSocket.enabled" }}
{{- end }}
{{- $config := include "kubefan.nodeConfig" . | fromYaml }}
{{- if or $config.cacheTables (has "--cache-tables" .Values.extraArgs) }}
{{- fail "cacheTables is for the cluster form alone: instead of extraArgs, set config.cacheTables=true and node.config.cacheTables=false" }}
{{- end }}
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
{{- if and (not .Values.rbac.clusterScoped) (eq .Values.access "authorized-impersonate") }}
{{- fail "access=authorized-impersonate needs rbac.clusterScoped: the right to impersonate is a ClusterRole" }}
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
{{- $egress := .Values.networkPolicy.egress }}
{{- if and .Values.networkPolicy.enabled $egress.apiserverCIDRs (not $egress.extra) }}
{{- range $what := list "otlp" "proxy" "upstream" }}
{{- $setting := include "kubefan.connects" (list $ $what) }}
{{- if and $setting (not (index $egress $what)) }}
{{- fail (printf "%s is cut off by networkPolicy.egress.apiserverCIDRs: say in networkPolicy.egress.%s where it leads to" $setting $what) }}
{{- end }}
{{- end }}
{{- end }}
{{- $drain := include "kubefan.seconds" (.Values.drainTimeout | default "10s") | int }}
{{- range $form := list "cluster" "node" }}
{{- $values := index $.Values $form }}
{{- if and $values.enabled (lt (int $values.terminationGracePeriodSeconds) (add (int $values.preStopSeconds) $drain 10 | int)) }}
{{- fail (printf "%s.terminationGracePeriodSeconds=%d must be 10 s longer than preStopSeconds (%d) and drainTimeout (%ds) together: what is left to write follows the drain" $form (int $values.terminationGracePeriodSeconds) (int $values.preStopSeconds) $drain) }}
{{- end }}
{{- end }}
{{- with .Values.cluster.autoscaling }}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) }}
{{- fail (printf "cluster.autoscaling.minReplicas=%d is more than maxReplicas=%d" (int .minReplicas) (int .maxReplicas)) }}
{{- end }}
{{- end }}
{{- range $key := list "apiVersion" "kind" }}
{{- range $name, $config := dict "config" $.Values.config "node.config" $.Values.node.config }}
{{- if hasKey $config $key }}
{{- fail (printf "%s has %s, which the chart sets" $name $key) }}
{{- end }}
{{- end }}
{{- end }}
{{- range .Values.extraArgs }}
{{- if regexMatch "^--(listen|admin-listen|resource|namespace|tls-managed|peer-listen|peers)" . }}
{{- fail (printf "extraArgs has %s, which the chart sets from other values" .) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Contradictions to pods that need no network of pods. */}}
{{- define "kubefan.bootstrap" -}}
{{- $bootstrap := .Values.node.bootstrap }}
{{- if $bootstrap.enabled }}
{{- if not .Values.node.enabled }}
{{- fail "node.bootstrap.enabled needs node.enabled" }}
{{- end }}
{{- if not $bootstrap.k8sServiceHost }}
{{- fail "node.bootstrap.enabled needs node.bootstrap.k8sServiceHost, the address of the apiserver: a Service needs kube-proxy or a network agent, which may start after kubefan" }}
{{- end }}
{{- if ne .Values.access "authorized" }}
{{- fail "node.bootstrap.enabled needs access=authorized: agents need the requests that no cache answers, and with authorized-impersonate each node could act as every user" }}
{{- end }}
{{- $aliases := list }}
{{- range $bootstrap.hostAliases }}
{{- $aliases = concat $aliases .hostnames }}
{{- end }}
{{- range $name := list "k8sServiceHost" "upstream" }}
{{- $host := regexReplaceAll ":[0-9]+$" (get $bootstrap $name) "" }}
{{- $isOfService := or (hasSuffix ".svc" $host) (hasSuffix (printf ".svc.%s" $.Values.clusterDomain) $host) (eq $host "kubernetes.default") }}
{{- if and $isOfService (not (has $host $aliases)) }}
{{- fail (printf "node.bootstrap.%s=%s is the name of a Service: it needs the cluster's DNS, which may start after kubefan. Set an address, or give the name addresses in node.bootstrap.hostAliases" $name (get $bootstrap $name)) }}
{{- end }}
{{- end }}
{{- if eq (int $bootstrap.port) (int $bootstrap.adminPort) }}
{{- fail (printf "node.bootstrap.port and node.bootstrap.adminPort are both %d" (int $bootstrap.port)) }}
{{- end }}
{{- range .Values.extraEnv }}
{{- if has .name (list "KUBERNETES_SERVICE_HOST" "KUBERNETES_SERVICE_PORT" "KUBECONFIG" "KUBEFAN_KUBECONFIG") }}
{{- fail (printf "extraEnv has %s: with node.bootstrap.enabled, node.bootstrap.k8sServiceHost has the address of the apiserver" .name) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* The setting by which the pods connect to `otlp`, a `proxy` or another kubefan (`upstream`); empty if none does: (list $ WHAT). */}}
{{- define "kubefan.connects" -}}
{{- $values := (index . 0).Values }}
{{- $key := get (dict "otlp" "otlpEndpoint" "proxy" "" "upstream" "upstream") (index . 1) }}
{{- $variables := get (dict
  "otlp" (list "KUBEFAN_OTLP_ENDPOINT" "OTEL_EXPORTER_OTLP_ENDPOINT" "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
  "proxy" (list "HTTPS_PROXY" "https_proxy" "HTTP_PROXY" "http_proxy")
  "upstream" (list "KUBEFAN_UPSTREAM")) (index . 1) }}
{{- $found := list }}
{{- if and (eq (index . 1) "otlp") $values.otlp.endpoint }}{{ $found = append $found "otlp.endpoint" }}{{ end }}
{{- if $key }}
{{- if get $values.config $key }}{{ $found = append $found (printf "config.%s" $key) }}{{ end }}
{{- if and $values.node.enabled (get $values.node.config $key) }}{{ $found = append $found (printf "node.config.%s" $key) }}{{ end }}
{{- range $values.extraArgs }}
{{- $flag := splitList "=" . | first }}
{{- if eq $flag (printf "--%s" (kebabcase $key)) }}{{ $found = append $found (printf "%s of extraArgs" $flag) }}{{ end }}
{{- end }}
{{- end }}
{{- range $values.extraEnv }}
{{- if has .name $variables }}{{ $found = append $found (printf "%s of extraEnv" .name) }}{{ end }}
{{- end }}
{{- $found | first | default "" }}
{{- end }}
