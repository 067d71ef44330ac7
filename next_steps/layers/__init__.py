"""Made of several kernels: projections, MLP, a whole layer, a split loss.  May import lessons."""
