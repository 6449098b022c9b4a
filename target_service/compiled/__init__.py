"""The target's forward pass as one compiled graph, kept on disk from start to start.

A packed pass through stock Transformers modules costs some 9 ms of small operations and Python for
30 small layers; compiled ahead of time (torch.export, AOTInductor) it is one library in which they
are fused. Attention is left to the operator `flashduet::attend`: a kernel of our own in `native/`,
or Python where that cannot be compiled.
"""
