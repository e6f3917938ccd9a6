"""Other quantizers, each run as its own users run it, on the same text and the same linears."""
