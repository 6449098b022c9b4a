"""Data, training and honest evaluation of DFlash drafters (arXiv 2602.06036)."""
