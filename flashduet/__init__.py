"""What the target, the draft, the gateway and their clients share."""

__version__ = "0.1.0"

# Raised when a message changes its meaning; replicas of two releases compare it in handshakes.
PROTOCOL_VERSION = 1
