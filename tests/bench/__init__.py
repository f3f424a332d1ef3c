"""What the engine itself costs, measured: run by ``make bench`` on a quiet machine, asserted by nothing."""
