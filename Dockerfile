# A peer as a careful volunteer runs it. What an image cannot take away from itself, compose.yaml does: see docs/operating.md.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS build
COPY requirements.lock /
# One image runs on CPUs and on GPUs: PyTorch as the index has it. TORCH_INDEX, of PyTorch's CPU builds, makes one of a
# third the size for CPUs alone; that one package then comes without a hash.
ARG TORCH_INDEX=
RUN set -eu; python -m venv /venv; lock=/requirements.lock; \
    if [ -n "$TORCH_INDEX" ]; then \
        lock=/cpu.lock; torch=$(sed -n 's/^\(torch==[^ ]*\) .*/\1/p' /requirements.lock); \
        awk '/^[^ ]/ { keep = !/^(nvidia-|cuda-|triton==|torch==)/ } keep' /requirements.lock > "$lock"; \
        /venv/bin/pip install --no-cache-dir --no-deps --index-url "$TORCH_INDEX" "$torch"; \
    fi; \
    /venv/bin/pip install --no-cache-dir --no-deps --require-hashes -r "$lock"  # guard: --require-hashes ->

FROM ${BASE}
RUN groupadd --gid 10001 spes && useradd --uid 10001 --gid 10001 --home-dir /data --no-create-home spes \
    && install --directory --owner=spes --group=spes /data
COPY --from=build /venv /venv
COPY spes_p2p /app/spes_p2p
COPY peers /app/peers
COPY monitor /app/monitor
COPY configs /app/configs
COPY scripts /app/scripts
WORKDIR /app
ENV PATH=/venv/bin:$PATH PYTHONPATH=/app PYTHONDONTWRITEBYTECODE=1 HOME=/data
USER 10001:10001
VOLUME /data
EXPOSE 4001 4001/udp 8080
HEALTHCHECK --interval=60s --timeout=30s --start-period=15m \
    CMD ["python", "-m", "spes_p2p", "health", "--output", "/data/peer"]
ENTRYPOINT ["sh", "scripts/container.sh"]
