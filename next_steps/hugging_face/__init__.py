"""The kernels as a repository for Hugging Face's package `kernels`.  May import lessons, layers."""
