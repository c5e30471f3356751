{{- define "sluicegate.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{- define "sluicegate.selector" -}}
app.kubernetes.io/name: sluicegate
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "sluicegate.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "sluicegate.selector" . }}
{{- end }}

{{- define "sluicegate.isMongodb" -}}
{{- if eq .Values.store.kind "mongodb" }}true{{ end -}}
{{- end }}

{{- define "sluicegate.addressesSecret" -}}
{{- .Values.store.mongodb.existingSecret | default (printf "%s-addresses" (include "sluicegate.fullname" .)) -}}
{{- end }}

{{- define "sluicegate.tokensSecret" -}}
{{- .Values.tokens.existingSecret | default (printf "%s-tokens" (include "sluicegate.fullname" .)) -}}
{{- end }}

{{- define "sluicegate.hasTokens" -}}
{{- if or .Values.tokens.existingSecret .Values.tokens.file }}true{{ end -}}
{{- end }}

{{/* Values that would make brokers that do not start, or lose what they should keep. */}}
{{- define "sluicegate.check" -}}
{{- if include "sluicegate.isMongodb" . }}
{{- $mongodb := .Values.store.mongodb }}
{{- if not (or $mongodb.existingSecret $mongodb.uri) }}
{{- fail "set store.mongodb.existingSecret or store.mongodb.uri, or store.kind=sqlite" }}
{{- end }}
{{- if and $mongodb.existingSecret (or $mongodb.uri .Values.signals.uri) }}
{{- fail "with store.mongodb.existingSecret, that Secret holds all addresses: leave store.mongodb.uri and signals.uri empty" }}
{{- end }}
{{- if and .Values.signals.fromSecret (not $mongodb.existingSecret) }}
{{- fail "signals.fromSecret needs store.mongodb.existingSecret" }}
{{- end }}
{{- else }}
{{- if .Values.autoscaling.enabled }}
{{- fail "one SQLite file has one broker: autoscaling needs store.kind=mongodb" }}
{{- end }}
{{- end }}
{{- if and .Values.insecure (include "sluicegate.hasTokens" .) }}
{{- fail "insecure=true and tokens contradict each other" }}
{{- end }}
{{- if not (or .Values.insecure (include "sluicegate.hasTokens" .)) }}
{{- fail "set tokens.existingSecret or tokens.file; `sluicegate token new` makes the file. insecure=true lets everyone do everything" }}
{{- end }}
{{- if and .Values.tokens.existingSecret .Values.tokens.file }}
{{- fail "set one of tokens.existingSecret and tokens.file" }}
{{- end }}
{{- if and .Values.tls.enabled (not .Values.tls.existingSecret) }}
{{- fail "set tls.existingSecret; tls.enabled=false serves plain text" }}
{{- end }}
{{- if and .Values.tls.clientCertificates (not .Values.tls.enabled) }}
{{- fail "tls.clientCertificates needs tls.enabled" }}
{{- end }}
{{- $own := list "listen" "http_listen" "store" "store_file" "signals" "signals_file" "database" "tokens_file" "insecure" "tls_cert" "tls_key" "tls_client_ca" }}
{{- range $name := keys .Values.settings | sortAlpha }}
{{- if has $name $own }}
{{- fail (printf "settings.%s: the chart sets it; use the value made for it" $name) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "sluicegate.settings" -}}
listen = "0.0.0.0:7400"
http_listen = "0.0.0.0:7401"
{{- if not (hasKey .Values.settings "log_format") }}
log_format = "json"
{{- end }}
{{- if include "sluicegate.isMongodb" . }}
store_file = "/etc/sluicegate/addresses/store"
database = {{ .Values.store.mongodb.database | toJson }}
{{- if or .Values.signals.uri .Values.signals.fromSecret }}
signals_file = "/etc/sluicegate/addresses/signals"
{{- end }}
{{- else }}
store = "sqlite:/var/lib/sluicegate/sluicegate.db"
{{- end }}
{{- if .Values.insecure }}
insecure = true
{{- else }}
tokens_file = "/etc/sluicegate/tokens/tokens.toml"
{{- end }}
{{- if .Values.tls.enabled }}
tls_cert = "/etc/sluicegate/tls/tls.crt"
tls_key = "/etc/sluicegate/tls/tls.key"
{{- if .Values.tls.clientCertificates }}
tls_client_ca = "/etc/sluicegate/tls/ca.crt"
{{- end }}
{{- end }}
{{- range $name, $value := .Values.settings }}
{{ $name }} = {{ $value | toJson }}
{{- end }}
{{- end }}

{{/* The pod, the same in the Deployment and the StatefulSet but for the volume of the file. */}}
{{- define "sluicegate.pod" -}}
metadata:
  labels:
    {{- include "sluicegate.selector" . | nindent 4 }}
    {{- with .Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    # Settings and addresses are read at the start alone.
    checksum/config: {{ include (print .Template.BasePath "/config.yaml") . | sha256sum }}
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  terminationGracePeriodSeconds: {{ .Values.terminationGracePeriodSeconds }}
  # The addresses of Services, as variables, are no settings of the broker.
  enableServiceLinks: false
  automountServiceAccountToken: false
  {{- with .Values.serviceAccountName }}
  serviceAccountName: {{ . }}
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 7400
    runAsGroup: 7400
    fsGroup: 7400
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile:
      type: RuntimeDefault
  {{- if include "sluicegate.isMongodb" . }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "sluicegate.selector" . | nindent 10 }}
  {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: sluicegate
      image: {{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args: ["--config", "/etc/sluicegate/settings/sluicegate.toml"]
      ports:
        - { name: grpc, containerPort: 7400 }
        - { name: http, containerPort: 7401 }
      # A broker serves once its store is open. Bringing the store up to date may take minutes.
      startupProbe:
        httpGet: { path: /healthz, port: http }
        periodSeconds: 2
        failureThreshold: 300
      # Alive while the broker responds; ready while its store responds and it is not draining.
      livenessProbe:
        httpGet: { path: /healthz, port: http }
        periodSeconds: 10
        timeoutSeconds: 3
        failureThreshold: 3
      readinessProbe:
        httpGet: { path: /readyz, port: http }
        periodSeconds: 3
        timeoutSeconds: 3
        failureThreshold: 2
      resources:
        {{- toYaml .Values.resources | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities:
          drop: [ALL]
      volumeMounts:
        - { name: settings, mountPath: /etc/sluicegate/settings, readOnly: true }
        {{- if include "sluicegate.isMongodb" . }}
        - { name: addresses, mountPath: /etc/sluicegate/addresses, readOnly: true }
        {{- else }}
        - { name: data, mountPath: /var/lib/sluicegate }
        {{- end }}
        {{- if not .Values.insecure }}
        - { name: tokens, mountPath: /etc/sluicegate/tokens, readOnly: true }
        {{- end }}
        {{- if .Values.tls.enabled }}
        - { name: tls, mountPath: /etc/sluicegate/tls, readOnly: true }
        {{- end }}
        {{- with .Values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: settings
      configMap: { name: {{ include "sluicegate.fullname" . }} }
    {{- if include "sluicegate.isMongodb" . }}
    - name: addresses
      secret: { secretName: {{ include "sluicegate.addressesSecret" . }}, defaultMode: 0440 }
    {{- end }}
    {{- if not .Values.insecure }}
    - name: tokens
      secret: { secretName: {{ include "sluicegate.tokensSecret" . }}, defaultMode: 0440 }
    {{- end }}
    {{- if .Values.tls.enabled }}
    - name: tls
      secret: { secretName: {{ .Values.tls.existingSecret }}, defaultMode: 0440 }
    {{- end }}
    {{- with .Values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
