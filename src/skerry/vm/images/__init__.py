"""What machines are made of: kernels, first file systems, root file systems; made once and kept."""
