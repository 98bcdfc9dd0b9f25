{{/* What the pods of both forms have in common. Arguments: root, form (cluster or node). */}}

{{/* The restricted pod security standard. */}}
{{- define "kubefan.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end }}
{{- define "kubefan.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* The flags of both forms. */}}
{{- define "kubefan.args" -}}
{{- range .Values.resources }}
- --resource={{ include "kubefan.resource" . }}
{{- end }}
{{- range .Values.namespaces }}
- --namespace={{ . }}
{{- end }}
- --log-format={{ .Values.log.format }}
- --log-level={{ .Values.log.level }}
{{- with .Values.otlp.endpoint }}
- --otlp-endpoint={{ . }}
{{- end }}
{{- with .Values.drainTimeout }}
- --drain-timeout={{ . }}
{{- end }}
{{- with .Values.connectionAgeMax }}
- --connection-age-max={{ . }}
{{- end }}
{{- with .Values.tls.minVersion }}
- --tls-min-version={{ . }}
{{- end }}
{{- if .Values.admin.authorization }}
- --admin-authorization
{{- end }}
- --config=/etc/kubefan/config/config.yaml
{{- with .Values.extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "kubefan.probes" -}}
# Ready once every resource is synced, which may take a while in a large cluster. It stays ready
# through an outage of the apiserver, because the cache still answers.
readinessProbe:
  httpGet: { path: /readyz, port: http-admin{{ if .Values.admin.authorization }}, scheme: HTTPS{{ end }} }
  periodSeconds: 5
  timeoutSeconds: 3
# Independent of the apiserver: an outage there must not restart kubefan.
livenessProbe:
  httpGet: { path: /livez, port: http-admin{{ if .Values.admin.authorization }}, scheme: HTTPS{{ end }} }
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}

{{/* Serves until the address is gone from the endpoints, and drains then. */}}
{{- define "kubefan.lifecycle" -}}
{{- if . }}
lifecycle:
  preStop:
    sleep: { seconds: {{ . }} }
{{- end }}
{{- end }}

{{/* Where pods may run. */}}
{{- define "kubefan.placement" -}}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Labels of a pod: (list $ FORM). Not the version of the chart: it alone restarts no pod. */}}
{{- define "kubefan.podLabels" -}}
{{- $root := index . 0 }}{{ $form := index . 1 }}{{ $values := index $root.Values $form -}}
{{ include "kubefan.selector" $root }}
app.kubernetes.io/component: {{ $form }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- with $values.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "kubefan.podAnnotations" -}}
{{- $root := index . 0 }}{{ $form := index . 1 }}{{ $values := index $root.Values $form }}
{{- $annotations := dict "kubectl.kubernetes.io/default-container" "kubefan" }}
{{- toYaml (merge (dict) $values.podAnnotations $annotations) }}
{{- end }}

{{/* It is there without settings too: kubefan looks only at a file that was there at its start. */}}
{{- define "kubefan.configVolume" -}}
- name: config
  configMap: { name: {{ include "kubefan.fullname" . }} }
{{- end }}
{{- define "kubefan.configMount" -}}
- { name: config, mountPath: /etc/kubefan/config, readOnly: true }
{{- end }}
