"""One machine a file, its table on the first screen. Nothing here may import I/O, a clock or randomness."""
