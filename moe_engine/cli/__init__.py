"""The commands, a module each: read the words, check everything, then start. Only here do ranks start."""
