"""`flashduet check lossless`: the same tokens with and without drafting, and from Transformers."""
