"""The layer in other libraries: Hugging Face transformers, and code that was written for MegaBlocks."""
