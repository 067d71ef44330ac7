"""What puts kernels into a Hugging Face model.  May import lessons and layers."""
