# One peer in a container. The ordinary torch release for Linux brings CUDA's libraries with it; for a small image
# name a CPU build, and the index that has it:
#   docker build --build-arg TORCH=torch==2.13.0+cpu --build-arg PIP_EXTRA_INDEX_URL=... .

FROM python:3.11-slim AS build
ARG TORCH=torch==2.13.0
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
# The dependencies by themselves first: a layer of a gigabyte that a change of our code must not rebuild.
COPY pyproject.toml requirements.lock ./
RUN python -m venv /opt/gossamer \
 && grep -v '^torch==' requirements.lock >constraints.txt \
 && python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
    >dependencies.txt \
 && /opt/gossamer/bin/pip install -c constraints.txt -r dependencies.txt "$TORCH"
COPY . .
RUN /opt/gossamer/bin/pip install --no-deps .

FROM python:3.11-slim
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Gossamer" \
      org.opencontainers.image.description="Train one language model together over machines that nobody controls as a whole." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="$REVISION"
COPY --from=build /opt/gossamer /opt/gossamer
# The base image ships the standard library as source, and our user may not write beside it: compile it here, or every
# health check does. Volumes take their owner from the folders when they are first made.
RUN python -m compileall -q -x '/(lib2to3|tests?)/' /usr/local/lib/python3.11 \
 && mkdir -p /data /cache /shared /run/gossamer \
 && chown 10001:10001 /data /cache /shared /run/gossamer
ENV PATH=/opt/gossamer/bin:$PATH \
    HOME=/data \
    GOSSAMER_DATA_DIR=/data \
    GOSSAMER_CACHE_DIR=/cache \
    GOSSAMER_RUNTIME_DIR=/run/gossamer \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /data
# Identity and checkpoints: a peer that lost its identity is a new peer. The cache (tokenized texts) can be made again.
VOLUME /data /cache
EXPOSE 31337/tcp
STOPSIGNAL SIGTERM
# Healthy is who serves; a joiner may first copy weights over a slow line, or tokenize a long text.
HEALTHCHECK --interval=20s --timeout=30s --start-period=600s --retries=3 CMD ["gossamer", "healthcheck"]
ENTRYPOINT ["gossamer"]
CMD ["join"]
