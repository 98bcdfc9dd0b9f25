{{- define "kubefan.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "kubefan.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride }}
{{- else if contains (include "kubefan.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "kubefan.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* Labels that never change: selectors of workloads have them. */}}
{{- define "kubefan.selector" -}}
app.kubernetes.io/name: {{ include "kubefan.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kubefan.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "kubefan.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The head of every object with a namespace: (list $ NAME). */}}
{{- define "kubefan.metadata" -}}
{{- $root := index . 0 -}}
name: {{ index . 1 }}
namespace: {{ $root.Release.Namespace }}
labels:
  {{- include "kubefan.labels" $root | nindent 2 }}
{{- end }}

{{- define "kubefan.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default .Chart.AppVersion }}
{{- end }}
{{- end }}

{{- define "kubefan.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "kubefan.fullname" .) }}
{{- end }}

{{/* The Services: of all clients, of the cluster form alone, and the headless one for gRPC and peers. */}}
{{- define "kubefan.clusterService" -}}
{{ include "kubefan.fullname" . }}{{ if .Values.node.enabled }}-cluster{{ end }}
{{- end }}
{{- define "kubefan.headless" -}}
{{ include "kubefan.fullname" . }}-headless
{{- end }}

{{- define "kubefan.tlsSecret" -}}
{{- if eq .Values.tls.source "existingSecret" -}}
{{ .Values.tls.existingSecret }}
{{- else -}}
{{ include "kubefan.fullname" . }}-tls
{{- end }}
{{- end }}

{{/* The Secret that nodes mount. A kubelet may read all of it, whatever the pod mounts, so it never
has the key of the managed CA. */}}
{{- define "kubefan.nodeTlsSecret" -}}
{{- if eq .Values.tls.source "managed" -}}
{{ include "kubefan.fullname" . }}-node-tls
{{- else -}}
{{ include "kubefan.tlsSecret" . }}
{{- end }}
{{- end }}

{{/* The Secret of the peers' certificate. Empty: the managed one, or none. */}}
{{- define "kubefan.peersSecret" -}}
{{- if .Values.peers.existingSecret -}}
{{ .Values.peers.existingSecret }}
{{- else if and (eq .Values.tls.source "certManager") .Values.tls.certManager.peersIssuerRef.name -}}
{{ include "kubefan.fullname" . }}-peers
{{- end }}
{{- end }}

{{/* "true" if replicas speak to each other. */}}
{{- define "kubefan.peers" -}}
{{- if and .Values.peers.enabled (or (eq .Values.tls.source "managed") (include "kubefan.peersSecret" .)) }}true{{ end }}
{{- end }}

{{/* The names of the certificate, separated by commas. The namespace is an argument: it may be a
variable of the container, so that kustomize can move the installation. */}}
{{- define "kubefan.dnsNames" -}}
{{- $root := index . 0 }}{{ $namespace := index . 1 }}{{ $names := list }}
{{- $services := list (include "kubefan.fullname" $root) (include "kubefan.clusterService" $root) (include "kubefan.headless" $root) | uniq }}
{{- range $service := $services }}
{{- range $suffix := list "" (printf ".%s" $namespace) (printf ".%s.svc" $namespace) (printf ".%s.svc.%s" $namespace $root.Values.clusterDomain) }}
{{- $names = append $names (printf "%s%s" $service $suffix) }}
{{- end }}
{{- end }}
{{- $headless := include "kubefan.headless" $root }}
{{- $names = append $names (printf "*.%s.%s.svc" $headless $namespace) }}
{{- $names = append $names (printf "*.%s.%s.svc.%s" $headless $namespace $root.Values.clusterDomain) }}
{{- if and $root.Values.node.enabled $root.Values.node.bootstrap.enabled }}
{{- /* The address of the agents in the node's network. */}}
{{- $names = append $names "localhost" }}
{{- end }}
{{- concat $names $root.Values.tls.extraDnsNames | uniq | join "," }}
{{- end }}

{{/* The namespaces with the ConfigMap of the CA. */}}
{{- define "kubefan.caNamespaces" -}}
{{- prepend .Values.caBundle.namespaces .Release.Namespace | uniq | join "," }}
{{- end }}

{{/* Seconds of a duration such as 30s, 5m or 1h. */}}
{{- define "kubefan.seconds" -}}
{{- $number := regexFind "^[0-9]+" . | int }}
{{- if hasSuffix "m" . }}{{ mul $number 60 }}{{ else if hasSuffix "h" . }}{{ mul $number 3600 }}{{ else }}{{ $number }}{{ end }}
{{- end }}

{{/* A resource as kubectl names it. */}}
{{- define "kubefan.resource" -}}
{{ .name }}{{ with .group }}.{{ . }}{{ end }}{{ with .encoding }}={{ . }}{{ end }}
{{- end }}
