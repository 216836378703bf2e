"""What caches cost in accuracy on real models: `python -m eval.quality`, plots and tables."""
