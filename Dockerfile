# syntax=docker/dockerfile:1
# The image of every node: Ray, this package, the jobs' entrypoints and configs in /app. From the root of the project:
#
#   docker build -t your-registry/scalingnote:0.1.0-ray2.60.0-cpu .
#   docker build -t your-registry/scalingnote:0.1.0-ray2.60.0-gpu --build-arg DEVICE=cu128 --build-arg EXTRAS=gpu,onnx,redis,rerank .
#
# Versions are those of constraints.txt; cpu and gpu are all of train and serve. The GPU image compiles
# flash-attn, which takes long.
ARG RAY=2.60.0
ARG DEVICE=cpu

FROM rayproject/ray:${RAY}-py311-${DEVICE} AS wheel
COPY --chown=1000:100 . /tmp/source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /tmp/wheel /tmp/source

FROM rayproject/ray:${RAY}-py311-${DEVICE}
ARG EXTRAS=cpu,onnx,redis,rerank
# What builds from source there needs torch while it is built, so torch comes first.
RUN --mount=type=bind,from=wheel,source=/tmp/wheel,target=/tmp/wheel \
    --mount=type=bind,source=constraints.txt,target=/tmp/constraints.txt \
    pip install --no-cache-dir -c /tmp/constraints.txt torch setuptools wheel packaging ninja psutil && \
    pip install --no-cache-dir --no-build-isolation -c /tmp/constraints.txt "$(echo /tmp/wheel/*.whl)[${EXTRAS}]"
COPY --chown=1000:100 jobs /app/jobs
COPY --chown=1000:100 configs /app/configs
# A number, so that Kubernetes can see that it is not root.
USER 1000
WORKDIR /app
