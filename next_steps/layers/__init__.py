"""Modules made of several kernels: projections, MLP, a whole layer.  May import lessons."""
