"""The lessons after lesson 12: further kernels, and what puts kernels together."""
