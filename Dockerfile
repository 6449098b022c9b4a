# One image, three commands:
#   python -m target_service | python -m draft_service | python -m gateway
FROM python:3.11-slim

# A package index of your own, or PyTorch's CPU-only wheels; see docs/containers.md.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL

# The third line is what `flashduet up` sets: a service that waits must hardly spin, and a log is no
# place for progress bars.
ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=20000 KMP_BLOCKTIME=1 TOKENIZERS_PARALLELISM=false TQDM_DISABLE=1 \
    FLASHDUET_CACHE=/cache HF_HOME=/cache/huggingface \
    FLASHDUET_TARGET_SOCKET_DIR=/run/flashduet FLASHDUET_DRAFT_SOCKET_DIR=/run/flashduet \
    FLASHDUET_TARGET_LISTEN=0.0.0.0:50051 \
    FLASHDUET_DRAFT_LISTEN=0.0.0.0:50052 \
    FLASHDUET_GATEWAY_LISTEN=0.0.0.0:50050 \
    FLASHDUET_GATEWAY_HTTP_LISTEN=0.0.0.0:8000

# For compiled passes of targets in 16 bits; empty leaves it out.
ARG COMPILER=g++
RUN [ -z "$COMPILER" ] || { apt-get update \
        && apt-get install --yes --no-install-recommends $COMPILER \
        && rm -rf /var/lib/apt/lists/*; }

WORKDIR /app

# What changes seldom first: the dependencies come from these two files alone and stay in a layer of
# their own. The packages need a file each, or an editable install leaves them off Python's path.
COPY pyproject.toml requirements.lock ./
RUN touch README.md LICENSE && mkdir models \
    && for package in flashduet target_service draft_service gateway flashduet_cli drafter_training \
           engine_probes; \
       do mkdir $package && touch $package/__init__.py; done \
    && pip install --constraint requirements.lock --editable .

# Target and draft pass a descriptor by a socket in /run/flashduet, which must be theirs alone, so
# they run as the same user; a volume mounted there takes over owner and mode.
RUN useradd --create-home --uid 10001 flashduet \
    && mkdir -p /cache /run/flashduet \
    && chown flashduet:flashduet /cache /run/flashduet \
    && chmod 700 /run/flashduet

# .dockerignore names what comes along. Readable by all, whatever the umask of the checkout was.
COPY --chmod=755 . .
RUN cd / && flashduet --help > /dev/null

USER flashduet
VOLUME ["/cache"]
EXPOSE 50050 50051 50052 8000
# Health is asked with `python -m flashduet.healthcheck 127.0.0.1:PORT`; which port depends on the
# command, so that docker-compose.yml has the checks.
CMD ["python", "-m", "gateway"]
