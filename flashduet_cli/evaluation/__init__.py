"""What `flashduet eval` measures: acceptance length on real decoding through the services."""
