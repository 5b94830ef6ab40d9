{{- define "dmsc.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion | default "latest" }}
{{- end }}

{{- define "dmsc.bus" -}}
{{ .Values.bus.url | default (printf "nats://%s-bus:4222" .Release.Name) }}
{{- end }}

{{- define "dmsc.labels" -}}
app.kubernetes.io/name: dmsc
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* One part: a Deployment. Takes root, name, component, replicas, args, files, port, token, pools. */ -}}
{{- define "dmsc.part" -}}
{{- $root := .root -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $root.Release.Name }}-{{ .name }}
  labels:
    {{- include "dmsc.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
spec:
  replicas: {{ .replicas }}
  selector:
    matchLabels:
      app.kubernetes.io/instance: {{ $root.Release.Name }}
      dmsc/part: {{ .name }}
  template:
    metadata:
      labels:
        {{- include "dmsc.labels" $root | nindent 8 }}
        app.kubernetes.io/component: {{ .component }}
        dmsc/part: {{ .name }}
      {{- if .pools }}
      annotations:
        dmsc/pools: {{ .pools | toYaml | sha256sum }}
      {{- end }}
    spec:
      serviceAccountName: {{ $root.Release.Name }}{{ if .token }}-provisioner{{ end }}
      automountServiceAccountToken: {{ .token | default false }}
      enableServiceLinks: false
      terminationGracePeriodSeconds: 30
      securityContext:
        runAsNonRoot: true
        runAsUser: 10001
        fsGroup: 10001
        seccompProfile: {type: RuntimeDefault}
      topologySpreadConstraints:
        {{- range $key := list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
        - maxSkew: 1
          topologyKey: {{ $key }}
          whenUnsatisfiable: ScheduleAnyway
          labelSelector:
            matchLabels:
              app.kubernetes.io/instance: {{ $root.Release.Name }}
              app.kubernetes.io/component: {{ $.component }}
        {{- end }}
      {{- with $root.Values.image.pullSecrets }}
      imagePullSecrets: {{ toYaml . | nindent 8 }}
      {{- end }}
      {{- with $root.Values.nodeSelector }}
      nodeSelector: {{ toYaml . | nindent 8 }}
      {{- end }}
      {{- with $root.Values.tolerations }}
      tolerations: {{ toYaml . | nindent 8 }}
      {{- end }}
      {{- with $root.Values.priorityClassName }}
      priorityClassName: {{ . }}
      {{- end }}
      containers:
        - name: dmsc
          image: {{ include "dmsc.image" $root | quote }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          args: {{ toYaml .args | nindent 12 }}
          env:
            - {name: HOME, value: /var/lib/dmsc}
            - {name: DMSC_STATE, value: /var/lib/dmsc}
            - {name: DMSC_BUS, value: {{ include "dmsc.bus" $root | quote }}}
            - {name: DMSC_REPLICAS, value: {{ $root.Values.bus.replicas | quote }}}
            - {name: DMSC_METRICS_PORT, value: {{ $root.Values.metrics.port | quote }}}
            - {name: DMSC_METRICS_BIND, value: 0.0.0.0}
            - name: DMSC_BUS_TOKEN
              valueFrom:
                secretKeyRef: {name: {{ $root.Values.secrets }}-{{ .name }}, key: credential}
            {{- if .files }}
            - {name: DMSC_TOKENS, value: /run/dmsc/own/tokens.yaml}
            - {name: DMSC_USER_KEY, value: /run/dmsc/own/user_key}
            - {name: DMSC_GUARD_KEYS, value: /run/dmsc/own/guard.json}
            - {name: DMSC_AUDIT_FOLDER, value: /var/lib/dmsc/audit}
            {{- end }}
            {{- if .pools }}
            - {name: DMSC_POOLS, value: /etc/dmsc/pools.yaml}
            {{- end }}
            {{- range $name, $value := $root.Values.environment }}
            - {name: {{ $name }}, value: {{ $value | quote }}}
            {{- end }}
          ports:
            - {name: metrics, containerPort: {{ $root.Values.metrics.port }}}
            {{- if .port }}
            - {name: http, containerPort: {{ .port }}}
            {{- end }}
          startupProbe:
            httpGet: {path: /healthz, port: metrics}
            periodSeconds: 2
            failureThreshold: 60
          livenessProbe:
            httpGet: {path: /healthz, port: metrics}
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 6
          readinessProbe:
            httpGet: {path: {{ if .port }}/readyz{{ else }}/healthz{{ end }}, port: {{ if .port }}http{{ else }}metrics{{ end }}}
            periodSeconds: 5
            timeoutSeconds: 5
          resources: {{ toYaml $root.Values.resources | nindent 12 }}
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities: {drop: [ALL]}
          volumeMounts:
            - {name: state, mountPath: /var/lib/dmsc}
            - {name: tmp, mountPath: /tmp}
            {{- if .files }}
            - {name: own, mountPath: /run/dmsc/own, readOnly: true}
            {{- end }}
            {{- if .pools }}
            - {name: pools, mountPath: /etc/dmsc, readOnly: true}
            {{- end }}
      volumes:
        - {name: state, emptyDir: {}}
        - {name: tmp, emptyDir: {}}
        {{- if .files }}
        - name: own
          secret: {secretName: {{ $root.Values.secrets }}-{{ .name }}}
        {{- end }}
        {{- if .pools }}
        - name: pools
          configMap: {name: {{ $root.Release.Name }}-pools}
        {{- end }}
{{- end }}
