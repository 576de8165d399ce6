"""From text to micro-batches.

`tokens` the .bin/.idx files · `text` files, byte tokenizer, split and cache · `order` which row comes when ·
`batches` packed rows as tensors, with the borders of their documents · `baseline` the bigram model to beat.
"""
