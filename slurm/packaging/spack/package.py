"""Spack recipe of the user's half of gemini-hpc: what a training imports, and the command.

Copy it to packages/py-gemini-hpc/package.py of a repository of your site, and install from a checkout:
`spack dev-build -d CHECKOUT py-gemini-hpc@main`. No archive of releases exists. The nodes' half (prolog, epilog,
controller, plugin) is no work for Spack: root runs it from a fixed path, see docs/install.md.
"""

from spack.package import *  # noqa: F403


class PyGeminiHpc(PythonPackage):  # noqa: F405
    """In-memory checkpoint replicas for training jobs on Slurm."""

    license("Apache-2.0")

    version("main")  # noqa: F405

    variant("torch", default=True, description="The Checkpointer for PyTorch")  # noqa: F405
    variant("mpi", default=False, description="The Checkpointer for MPI programs")  # noqa: F405
    variant("tier", default=False, description="Tier files, for versions and export")  # noqa: F405

    depends_on("python@3.11:", type=("build", "run"))  # noqa: F405
    depends_on("py-hatchling@1.25:", type="build")  # noqa: F405
    depends_on("py-msgspec@0.18:", type=("build", "run"))  # noqa: F405
    depends_on("py-xxhash@3.5:", type=("build", "run"))  # noqa: F405
    depends_on("py-torch@2.6:", type=("build", "run"), when="+torch")  # noqa: F405
    depends_on("py-numpy@1.26:", type=("build", "run"), when="+torch")  # noqa: F405
    depends_on("py-mpi4py@4:", type=("build", "run"), when="+mpi")  # noqa: F405
    depends_on("py-h5py@3.10:", type=("build", "run"), when="+tier")  # noqa: F405
    depends_on("py-numpy@1.26:", type=("build", "run"), when="+tier")  # noqa: F405
