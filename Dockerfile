# syntax=docker/dockerfile:1
# The image of every node: Ray, this package, the jobs' entrypoints and configs in /app. From the root of the project:
#
#   docker build -t your-registry/scalingnote:0.1.0-ray2.60.0-cpu .
#   docker build -t your-registry/scalingnote:0.1.0-ray2.60.0-gpu --build-arg EXTRAS=gpu,onnx,redis,rerank \
#     --build-arg CONSTRAINTS=constraints-gpu.txt .
#
# cpu and gpu are all of train and serve; vLLM beside them is EXTRAS=gpu,vllm,onnx,redis,rerank with
# constraints-vllm.txt. CUDA 13.0 comes with torch's own packages, so the base has none that could differ from
# it: a node needs NVIDIA's driver (580 or newer) and its container runtime.
ARG RAY=2.60.0

FROM rayproject/ray:${RAY}-py311-cpu AS wheel
COPY --chown=1000:100 . /tmp/source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /tmp/wheel /tmp/source

FROM rayproject/ray:${RAY}-py311-cpu
ARG EXTRAS=cpu,onnx,redis,rerank
ARG CONSTRAINTS=constraints.txt
RUN --mount=type=bind,from=wheel,source=/tmp/wheel,target=/tmp/wheel \
    --mount=type=bind,source=.,target=/tmp/source \
    pip install --no-cache-dir -c /tmp/source/${CONSTRAINTS} "$(echo /tmp/wheel/*.whl)[${EXTRAS}]"
# What NVIDIA's container runtime puts into the container; without it they have no effect.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --chown=1000:100 jobs /app/jobs
COPY --chown=1000:100 configs /app/configs
# A number, so that Kubernetes can see that it is not root.
USER 1000
WORKDIR /app
