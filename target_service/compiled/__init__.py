"""The target's forward pass as one compiled graph, kept on disk from start to start.

A packed pass through stock Transformers modules costs some 9 ms of small operations and Python for
30 small layers; compiled ahead of time (torch.export, AOTInductor) it is one library in which they
are fused, and only attention comes back to Python, as the operator `flashduet::attend`.
"""
