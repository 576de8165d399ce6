"""The layer in other libraries: Hugging Face transformers."""
