# One image for every entity: docker-compose.yml says which one a container is.
# Every package is one whose hash stands in deploy/*.lock (`make lock`). torch comes from whatever index the
# installer is configured for. To choose another build of it (CPU only is a tenth of the size), hand its index on:
# docker compose build --build-arg PIP_EXTRA_INDEX_URL=…; a build whose hash is not in deploy/torch.lock is
# refused: add it with `make lock ARGS="--torch-wheel FILE"`.

ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
RUN python -m venv /opt/dmsc
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# the dependencies first, in a layer that only the locks renew; a CPU-only torch needs no CUDA beside it
COPY deploy/*.lock ./
RUN /opt/dmsc/bin/pip install --no-deps --require-hashes -r requirements.lock -r torch.lock \
 && { /opt/dmsc/bin/pip show torch | grep -q '^Version: .*+cpu' \
   || /opt/dmsc/bin/pip install --no-deps --require-hashes -r torch-cuda.lock; }
COPY . .
# what builds it is in the lock, too
RUN /opt/dmsc/bin/pip install --no-deps --no-build-isolation .

FROM python:${PYTHON}-slim
LABEL org.opencontainers.image.title="dmsc" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10001 --create-home dmsc \
 && cd /run && install -d -o dmsc -g dmsc dmsc dmsc/aam dmsc/control dmsc/modules dmsc/nodes dmsc/clusters \
    dmsc/client dmsc/server /home/dmsc/runs /home/dmsc/audit
COPY --from=build /opt/dmsc /opt/dmsc
COPY --chmod=755 deploy/dmsc.sh /opt/dmsc/front/dmsc
COPY --chmod=755 deploy/cluster.sh /opt/dmsc/front/dmsc-cluster
COPY deploy/make_secrets.py /opt/dmsc/front/make_secrets.py
COPY --chown=dmsc:dmsc examples /home/dmsc/examples
ENV PATH=/opt/dmsc/front:/opt/dmsc/bin:$PATH \
    PYTHONUNBUFFERED=1
USER dmsc
WORKDIR /home/dmsc
ENTRYPOINT ["dmsc"]
CMD ["--help"]
