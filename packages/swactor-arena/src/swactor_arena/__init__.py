"""swactor plug-in: shared-memory arena and native ring."""
