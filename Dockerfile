# One image, three commands:
#   python -m target_service | python -m draft_service | python -m gateway
FROM python:3.11-slim

ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    OMP_WAIT_POLICY=PASSIVE \
    TOKENIZERS_PARALLELISM=false \
    FLASHDUET_CACHE=/cache \
    FLASHDUET_TARGET_SOCKET_DIR=/run/flashduet \
    FLASHDUET_DRAFT_SOCKET_DIR=/run/flashduet

WORKDIR /app

# What changes seldom first: the dependencies come from these alone and stay in their own layer.
COPY pyproject.toml requirements.lock README.md LICENSE ./
RUN mkdir flashduet target_service draft_service gateway flashduet_cli drafter_training \
    && pip install --constraint requirements.lock --editable .

COPY flashduet flashduet
COPY target_service target_service
COPY draft_service draft_service
COPY gateway gateway
COPY flashduet_cli flashduet_cli
COPY drafter_training drafter_training
COPY models models

# Target and draft pass a descriptor by a socket in /run/flashduet, which must be theirs alone, so
# they run as the same user; a volume mounted there takes over owner and mode.
RUN useradd --create-home --uid 10001 flashduet \
    && mkdir -p /cache /run/flashduet \
    && chown flashduet:flashduet /cache /run/flashduet \
    && chmod 700 /run/flashduet
USER flashduet
VOLUME ["/cache"]

# The gateway answers only when a target serves, and is the one to talk to.
EXPOSE 50050 50051 50052 8000
ENV FLASHDUET_TARGET_LISTEN=0.0.0.0:50051 \
    FLASHDUET_DRAFT_LISTEN=0.0.0.0:50052 \
    FLASHDUET_GATEWAY_LISTEN=0.0.0.0:50050 \
    FLASHDUET_GATEWAY_HTTP_LISTEN=0.0.0.0:8000
CMD ["python", "-m", "gateway"]
HEALTHCHECK --interval=10s --timeout=5s --start-period=180s --retries=3 \
    CMD ["python", "-m", "flashduet.healthcheck", "127.0.0.1:50050"]
