"""From text to micro-batches.

`text` files, documents, byte tokenizer, split · `tokens` the .bin/.idx files · `corpus` both together: the token files
of a text, cached · `order` which row comes when · `batches` packed rows as tensors, with the borders of their documents
· `baseline` the bigram model to beat.
"""
