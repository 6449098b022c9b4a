"""Generated from proto/flashduet/v1 by `make proto`; not edited by hand."""
