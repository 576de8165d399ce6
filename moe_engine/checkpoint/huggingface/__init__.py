"""Hugging Face folders: `names` says what lies where, `reader` reads weights out of one, `writer` makes one."""
