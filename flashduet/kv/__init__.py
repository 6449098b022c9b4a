"""Keys and values of many sequences in blocks: who holds which, and where the bytes lie."""
