"""What is particular to families of models: Transformers' loading and whole checkpoints."""
