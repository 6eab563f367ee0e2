"""Training of drafters: target features, blocks, losses, the trainer. Only the command line and its users import it."""
