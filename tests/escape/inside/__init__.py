"""The probe: what runs in a box and tries to get out of it, or to take more than was given. It runs nowhere else."""
