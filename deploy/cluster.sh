#!/bin/sh
# A whole cluster in one container: gateway and router in one process, the node agent in another. It is named
# after the container, so that `docker compose up --scale cluster=N` adds N of them. If one process ends, so
# does the other, and the container with them.
set -eu
cluster="${DMSC_CLUSTER:-c-$(hostname)}"
slots="${DMSC_SLOTS:-2}"

dmsc run gateway router --cluster "$cluster" --bind 0.0.0.0 --http-port 8080 &
services=$!
dmsc join --cluster "$cluster" --slots "$slots" --logs /tmp/logs &
agent=$!

stop() {
    kill -TERM "$agent" 2>/dev/null || true
    wait "$agent" || true
    kill -TERM "$services" 2>/dev/null || true
    wait "$services" || true
    exit "${1:-0}"
}
trap stop TERM INT
while kill -0 "$services" 2>/dev/null && kill -0 "$agent" 2>/dev/null; do
    sleep 1 &
    wait $!
done
stop 1
