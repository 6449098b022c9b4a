"""The command `flashduet`. It starts the services as processes and imports none of them."""
