"""Speed and size of saves and loads beside torch's own storage: ``python -m benchmarks``."""
