#!/bin/sh
# `dmsc` in a container, for its main process and for `docker compose exec` alike. Secrets come as files of the
# folders that this container has (make_secrets.py); what the environment says comes first. What runs as a part of
# the mesh shows the credential that DMSC_ROLE names; people's commands show their token, to the bus too.
set -eu
secrets="${DMSC_SECRETS:-/run/dmsc}"
if [ -z "${DMSC_TOKEN:-}" ] && [ -r "$secrets/client/token" ]; then
    DMSC_TOKEN="$(cat "$secrets/client/token")"
    export DMSC_TOKEN
fi
if [ -z "${DMSC_BUS_TOKEN:-}" ]; then
    case "${1:-} ${2:-}" in
    "run "* | "join "* | "policy run")
        for place in aam control modules nodes clusters; do
            if [ -r "$secrets/$place/${DMSC_ROLE:-}" ]; then
                DMSC_BUS_TOKEN="$(cat "$secrets/$place/$DMSC_ROLE")"
            fi
        done
        unset DMSC_TOKEN
        ;;
    *) DMSC_BUS_TOKEN="${DMSC_TOKEN:-}" ;;
    esac
    export DMSC_BUS_TOKEN
fi
exec /opt/dmsc/bin/dmsc "$@"
