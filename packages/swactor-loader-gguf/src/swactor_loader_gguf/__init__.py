"""swactor plug-in: GGUF index, byte ranges, tokenizer and chat template."""
