"""swactor plug-in: SWIM membership with sealed datagrams.

Hosts get it through the provider `swim` of kind `membership`; `machine.SwimMachine` is the protocol without
sockets, for simulations.
"""
