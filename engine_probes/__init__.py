"""What `flashduet bench` measures without the services: child processes that run one engine each.

    python -m engine_probes.transformers_peer | target | draft | transport

Each reads one JSON request a line and answers each with one line, so that its measurements can be
taken in turn with those of a running stack. The command line starts them as processes, as it does
the services, and imports none of them.
"""
