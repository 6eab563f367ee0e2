"""Speed under load: traces, the simulator, real sweeps, and advice."""
