"""Hook implementations of this plug-in."""
