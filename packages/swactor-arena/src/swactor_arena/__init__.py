"""swactor plug-in: shared-memory arena and native ring.

`swactor_arena.arena.MemfdArenas` is the plug-in; hosts get it through the provider `memfd` of kind `arena`.
"""
