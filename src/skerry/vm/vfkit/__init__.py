"""vfkit: machines on macOS. From outside only `hypervisor.VfkitHypervisor` and `folder.VfkitFolder` are used."""
