{{/* The parts that the pods of both forms share. Arguments: root, form (cluster or node). */}}

{{/* The restricted pod security standard. */}}
{{- define "kubefan.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
# Each mount would else let the group write, and kubefan refuses saved states that others may write.
fsGroupChangePolicy: OnRootMismatch
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
{{- if .Values.admin.authorization }}
- --admin-authorization
{{- end }}
- --config=/etc/kubefan/config/config.yaml
{{- with .Values.extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Clients that have moved away from the pod of their node must come back to it some time. */}}
{{- define "kubefan.connectionAgeMax" -}}
{{- .Values.connectionAgeMax | default (ternary "30m" "" .Values.node.enabled) }}
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

{{/* Placement and priority of pods. */}}
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

{{/* Placement and priority of the nodes' pods. */}}
{{- define "kubefan.nodePlacement" -}}
{{- $node := pick .Values.node "priorityClassName" "nodeSelector" "tolerations" "affinity" }}
{{- if .Values.node.bootstrap.enabled }}
{{- /* Without a network a node has these taints, and only its agents can remove them. */}}
{{- $taints := list (dict "key" "node.kubernetes.io/not-ready" "operator" "Exists") (dict "key" "node.kubernetes.io/network-unavailable" "operator" "Exists") }}
{{- $_ := set $node "priorityClassName" ($node.priorityClassName | default "system-node-critical") }}
{{- if not (has (dict "operator" "Exists") $node.tolerations) }}
{{- $_ := set $node "tolerations" (concat $node.tolerations $taints | uniq) }}
{{- end }}
{{- end }}
{{- toYaml $node }}
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
{{- /* Settings that need a restart, so that a change restarts the pods: config::reload::LIVE has the others. */}}
{{- $config := include (printf "kubefan.%sConfig" $form) $root | fromYaml }}
{{- $fixed := omit $config "apiVersion" "kind" "maxStaleness" "modes" "resources" "limits" }}
{{- with omit ($config.limits | default dict) "readsMax" "readsMaxPerIdentity" "subscribersMax" "subscribersMaxPerIdentity" }}
{{- $_ := set $fixed "limits" . }}
{{- end }}
{{- if $fixed }}
{{- $_ := set $annotations "kubefan.dev/config-checksum" (toJson $fixed | sha256sum) }}
{{- end }}
{{- toYaml (merge (dict) $values.podAnnotations $annotations) }}
{{- end }}

{{- define "kubefan.configMount" -}}
- { name: config, mountPath: /etc/kubefan/config, readOnly: true }
{{- end }}

{{/* The saved states of a form: flags, mounts and volumes, from the value `state` of the form. */}}
{{- define "kubefan.stateArgs" -}}
{{- if .enabled }}
- --state-dir=/var/lib/kubefan
{{- if .keySecret }}
- --state-key-file=/etc/kubefan/state-key/key
{{- end }}
{{- end }}
{{- end }}
{{- define "kubefan.stateMounts" -}}
{{- if .enabled }}
- { name: state, mountPath: /var/lib/kubefan }
{{- if .keySecret }}
- { name: state-key, mountPath: /etc/kubefan/state-key, readOnly: true }
{{- end }}
{{- end }}
{{- end }}
{{- define "kubefan.stateVolumes" -}}
{{- if .enabled }}
- name: state
  {{- toYaml (.volume | default (dict "emptyDir" dict)) | nindent 2 }}
{{- if .keySecret }}
- name: state-key
  secret: { secretName: {{ .keySecret }}, defaultMode: 288, items: [{ key: key, path: key }] }
{{- end }}
{{- end }}
{{- end }}

{{/* The keys of the configuration file that the values of the chart set: (list $ FORM). They count
more than those of `config`, as its flags do. */}}
{{- define "kubefan.ownConfig" -}}
{{- $root := index . 0 }}{{ $form := index . 1 }}{{ $limits := dict }}{{ $tuning := dict }}
{{- with include "kubefan.connectionAgeMax" $root }}
{{- $_ := set $limits "connectionAgeMax" . }}
{{- end }}
{{- if eq $form "node" }}
{{- /* The cluster form checks itself. Each node would cost the apiserver a list. */}}
{{- $_ := set $tuning "selfCheckInterval" "0s" }}
{{- if not $root.Values.node.fallback.enabled }}
{{- $_ := set $tuning "upstreamFallback" "never" }}
{{- end }}
{{- else if eq $root.Values.tls.source "managed" }}
{{- range $key, $value := $root.Values.tls.managed }}
{{- if $value }}
{{- $_ := set $tuning (printf "tlsManaged%s" (title $key)) $value }}
{{- end }}
{{- end }}
{{- end }}
{{- $own := dict }}
{{- if $limits }}{{ $_ := set $own "limits" $limits }}{{ end }}
{{- if $tuning }}{{ $_ := set $own "tuning" $tuning }}{{ end }}
{{- if $own }}{{ toYaml $own }}{{ end }}
{{- end }}

{{/* The configuration files. The flags that the chart sets count more. */}}
{{- define "kubefan.clusterConfig" -}}
apiVersion: kubefan.dev/v1alpha1
kind: ServeConfiguration
{{- $config := mergeOverwrite (deepCopy .Values.config) (include "kubefan.ownConfig" (list . "cluster") | fromYaml) }}
{{- if and .Values.node.enabled $config.modes }}
{{- /* Modes are for the clients of the nodes' pods, which apply them. The pods go on caching. */}}
{{- $user := printf "system:serviceaccount:%s:%s-node" .Release.Namespace (include "kubefan.fullname" .) }}
{{- $rule := dict "resources" (list "*") "users" (list $user) "mode" "Cache" }}
{{- $_ := set $config "modes" (prepend $config.modes $rule) }}
{{- end }}
{{- with $config }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- define "kubefan.nodeConfig" -}}
apiVersion: kubefan.dev/v1alpha1
kind: ServeConfiguration
{{- with mergeOverwrite (deepCopy .Values.config) (deepCopy .Values.node.config) (include "kubefan.ownConfig" (list . "node") | fromYaml) }}
{{ toYaml . }}
{{- end }}
{{- end }}
