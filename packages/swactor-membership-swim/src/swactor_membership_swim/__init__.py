"""swactor plug-in: SWIM membership with sealed datagrams."""
