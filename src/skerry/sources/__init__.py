"""What images are imported from: folders and tars with a root, an archive or an OCI layout in them."""
