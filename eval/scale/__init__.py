"""Memory and speed at length, beside what `oscar_hf.plan` says; and models over several GPUs."""
