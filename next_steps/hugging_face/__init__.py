"""Hugging Face's own ways: a repository for its package `kernels`, and TRL.  May import patches."""
