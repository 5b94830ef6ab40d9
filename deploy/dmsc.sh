#!/bin/sh
# `dmsc` in a container, for its main process and for `docker compose exec` alike. Secrets come as files (the
# volume that the service `secrets` fills, or the engine's own secrets); what the environment says comes first.
set -eu
secrets="${DMSC_SECRETS:-/run/dmsc}"
if [ -z "${DMSC_BUS_TOKEN:-}" ] && [ -r "$secrets/bus_token" ]; then
    DMSC_BUS_TOKEN="$(cat "$secrets/bus_token")"
    export DMSC_BUS_TOKEN
fi
if [ -z "${DMSC_TOKEN:-}" ] && [ -r "$secrets/token" ]; then
    DMSC_TOKEN="$(cat "$secrets/token")"
    export DMSC_TOKEN
fi
exec /opt/dmsc/bin/dmsc "$@"
