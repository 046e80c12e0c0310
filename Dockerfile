# One peer in a container. The ordinary torch release for Linux brings CUDA's libraries with it; for a small image
# name a CPU build, and the index that has it:
#   docker build --build-arg TORCH=torch==2.13.0+cpu --build-arg PIP_EXTRA_INDEX_URL=... .

FROM python:3.11-slim AS build
ARG TORCH=torch==2.13.0
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# torch by itself first: a layer of a gigabyte that a change of our code must not rebuild.
RUN python -m venv /opt/gossamer && /opt/gossamer/bin/pip install "$TORCH"
WORKDIR /src
COPY . .
RUN /opt/gossamer/bin/pip install -c requirements.lock .

FROM python:3.11-slim
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Gossamer" \
      org.opencontainers.image.description="Train one language model together over machines that nobody controls as a whole." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="$REVISION"
COPY --from=build /opt/gossamer /opt/gossamer
# Volumes take their owner from these folders when they are first made.
RUN mkdir -p /data /shared /run/gossamer && chown 10001:10001 /data /shared /run/gossamer
ENV PATH=/opt/gossamer/bin:$PATH \
    HOME=/data \
    GOSSAMER_DATA_DIR=/data \
    GOSSAMER_CACHE_DIR=/data/cache \
    GOSSAMER_RUNTIME_DIR=/run/gossamer \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /data
# Identity, checkpoints, tokenized texts. Keep it: a peer without its identity is a new peer.
VOLUME /data
EXPOSE 31337/tcp
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=10s --start-period=90s --retries=3 CMD ["gossamer", "healthcheck"]
ENTRYPOINT ["gossamer"]
CMD ["join"]
