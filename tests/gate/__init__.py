"""What the gate, `make test`, asks of its tests: that no result depends on the machine."""
