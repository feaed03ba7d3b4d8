"""The persistent tier: sealed versions as HDF5 files on a shared file system."""
