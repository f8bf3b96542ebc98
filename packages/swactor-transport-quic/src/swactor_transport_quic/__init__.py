"""swactor plug-in: QUIC edges and control on aioquic."""
