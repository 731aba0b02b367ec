"""Messages between ranks: processes, point-to-point transfers, what both sides agree on."""
