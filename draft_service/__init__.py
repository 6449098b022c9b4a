"""Runs a DFlash drafter (arXiv 2602.06036): context features in, blocks of draft tokens out."""
