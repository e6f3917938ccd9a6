"""What the command line does, one module per kind of command; `cli` registers them."""
