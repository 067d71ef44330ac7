"""The lessons after step 12: further kernels, and what puts kernels together."""
