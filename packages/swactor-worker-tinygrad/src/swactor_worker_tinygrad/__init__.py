"""swactor plug-in: device bridge and stage role code on tinygrad."""
